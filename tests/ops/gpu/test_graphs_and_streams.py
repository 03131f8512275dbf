"""The op on a GPU in CUDA graphs, under `torch.compile`, on streams, threads and devices."""

import pytest
import torch
import torch.nn.functional as F

import evoattn
from evoattn.backends.platform import CudaPlatform
from evoattn.model.shape_text import parse_shape
from evoattn.ops.runtime import Runtime, current
from tests.ops.gpu.gpu_problems import DECODE, ON_A_GPU, PREFILL, flags, inputs, require_right
from tests.ops.stand_in import stand_in

pytestmark = ON_A_GPU


@pytest.mark.parametrize("problem", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_a_graph_replays_with_other_contents(problem, recwarn):
    q, k, v = inputs(problem)
    evoattn.warmup([problem])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        middle = evoattn.attention(q, k, v, **flags(problem), strict=True)
        out = evoattn.attention(middle, k, v, **flags(problem), strict=True)
    for seed in (2, 3):
        fresh = inputs(problem, seed)
        for old, new in zip((q, k, v), fresh, strict=True):
            old.copy_(new)
        graph.replay()
        first = evoattn.attention(*fresh, **flags(problem), strict=True)
        expected = evoattn.attention(first, *fresh[1:], **flags(problem), strict=True)
        assert torch.equal(out, expected)
    assert not [w for w in recwarn if "evoattn" in str(w.message)]


def test_a_capture_that_meets_a_cold_kernel_takes_sdpa(tmp_path):
    q, k, v = inputs(PREFILL)
    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.cuda.synchronize()
    with current.use(Runtime(CudaPlatform(), stand_in, tmp_path)):
        graph = torch.cuda.CUDAGraph()
        with pytest.warns(RuntimeWarning, match=r"SDPA was captured"), torch.cuda.graph(graph):
            out = evoattn.attention(q, k, v, **flags(PREFILL))
        graph.replay()
        require_right(PREFILL, q, k, v, out)


def test_two_streams_and_many_calls():
    streams = [torch.cuda.Stream() for _ in range(2)]
    cases = [(problem, inputs(problem, seed)) for seed, problem in enumerate((DECODE, DECODE))]
    expected = [evoattn.attention(*three, **flags(problem), strict=True) for problem, three in cases]
    torch.cuda.synchronize()
    answers = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                answers[i].append(evoattn.attention(*cases[i][1], **flags(DECODE), strict=True))
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(answer, expected[i]) for answer in answers[i])


def test_a_thread_of_its_own():
    import threading

    q, k, v = inputs(PREFILL)
    expected, answers = evoattn.attention(q, k, v, **flags(PREFILL), strict=True), []
    thread = threading.Thread(target=lambda: answers.append(evoattn.attention(q, k, v, **flags(PREFILL), strict=True)))
    thread.start()
    thread.join()
    assert torch.equal(answers[0], expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_another_device():
    q, k, v = (t.to("cuda:1") for t in inputs(PREFILL))
    out = evoattn.attention(q, k, v, **flags(PREFILL), strict=True)
    assert out.device.index == 1
    require_right(PREFILL, q, k, v, out)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode):
    words = flags(PREFILL)
    compiled = torch.compile(
        lambda q, k, v: evoattn.attention(q * 1, k, v, **words, strict=True), fullgraph=True, mode=mode
    )
    for seed in range(4):
        q, k, v = inputs(PREFILL, seed)
        require_right(PREFILL, q, k, v, compiled(q, k, v))


def test_opcheck():
    from evoattn.ops.custom_op import attention_lse_op, attention_op

    small = parse_shape("B=1,H=4,S=200,D=64,dtype=fp16,mask=causal_upper_left,layout=bshd")
    for op in (attention_op, attention_lse_op):
        results = torch.library.opcheck(op, (*inputs(small), "causal_upper_left", True, 0.2, False))
        assert set(results.values()) == {"SUCCESS"}
