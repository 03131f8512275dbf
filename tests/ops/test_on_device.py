"""The op on a GPU: right answers, CUDA graphs, streams, devices, compile, autocast, blocks, and how long first calls
take.
"""

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from stand_in import stand_in

import evoattn
from evoattn.correctness.judge import judge_o
from evoattn.correctness.reference import make_answer, make_inputs
from evoattn.model.named_problems import parse_shape
from evoattn.model.problem import AttentionProblem
from evoattn.ops import current
from evoattn.ops.asked import mask_name
from evoattn.ops.platform import CudaPlatform
from evoattn.ops.runtime import Runtime

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

SHAPES = [
    "B=2,H=8,S=1024,D=64,dtype=fp16,mask=full",
    "B=2,H=8,S=1024,D=64,dtype=fp16,mask=causal_upper_left",
    "B=1,H=16,S=1000,D=128,dtype=bf16,mask=causal_upper_left",
    "B=1,H=32,Hkv=8,S=2048,D=128,dtype=bf16,mask=causal_upper_left",
    "B=1,H=32,Hkv=8,Sq=200,Sk=1777,D=128,dtype=bf16,mask=causal_lower_right",
    "B=1,H=8,Sq=300,Sk=200,D=64,dtype=fp16,mask=causal_lower_right",
    "B=1,H=32,Hkv=8,Sq=1,Sk=8192,D=128,dtype=bf16,mask=full",
    "B=16,H=32,Hkv=8,Sq=1,Sk=4000,D=128,dtype=fp16,mask=full",
    "B=2,H=12,S=1023,D=64,dtype=bf16,mask=full,layout=bshd",
    "B=1,H=16,S=777,D=80,dtype=fp16,mask=full,layout=bshd",
    "B=1,H=8,S=1025,D=256,dtype=bf16,mask=causal_upper_left",
    "B=1,H=8,Sq=113,Sk=203,D=96,dtype=fp16,mask=full",
    "B=1,H=4,Sq=64,Sk=16,D=512,dtype=fp32,mask=full",
    "B=1,H=4,S=256,D=64,dtype=fp32,mask=causal_upper_left",
    "B=1,H=4,S=128,D=512,dtype=fp16,mask=full",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def runtime(folder):
    """The stand-in rule behind the op, and a cache of this run's own."""
    with current.use(Runtime(CudaPlatform(), stand_in, folder)) as ours, torch.no_grad():
        torch.compiler.reset()
        yield ours


def flags(problem: AttentionProblem) -> dict:
    causal = "lower_right" if problem.mask == "causal_lower_right" else "upper_left"
    return dict(is_causal=problem.mask != "full", causal=causal, enable_gqa=problem.kv_heads != problem.heads)


def inputs(problem: AttentionProblem, seed: int = 1) -> tuple[torch.Tensor, ...]:
    return tuple(make_inputs(problem, seed, "cuda")[name] for name in "qkv")


def require_right(problem: AttentionProblem, q, k, v, out, scale: float | None = None) -> None:
    """flash-attention's rule, against float64."""
    if scale is not None:  # the reference knows 1/sqrt(head_dim) only
        q = (q.double() * (scale * problem.head_dim**0.5)).to(q.dtype)
    answer = make_answer(problem, dict(q=q, k=k, v=v), double=True)
    reason, _ = judge_o(out, answer)
    assert not reason


PREFILL = parse_shape(SHAPES[3])
DECODE = parse_shape(SHAPES[6])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_answer_is_right_and_stays_the_same(shape):
    problem = parse_shape(shape)
    q, k, v = inputs(problem)
    out = evoattn.attention(q, k, v, **flags(problem), strict=True)
    require_right(problem, q, k, v, out)
    assert out.stride() == torch.empty_like(q).stride()
    again = evoattn.attention(q, k, v, **flags(problem), strict=True)
    assert torch.equal(out, again)
    assert mask_name(problem.mask != "full", flags(problem)["causal"]) == problem.mask


@pytest.mark.parametrize("scale", [0.25, 0.5])
def test_the_scale_is_the_callers(scale):
    problem = parse_shape("B=1,H=8,S=500,D=64,dtype=fp16,mask=full")
    q, k, v = inputs(problem)
    out = evoattn.attention(q, k, v, scale=scale, strict=True)
    require_right(problem, q, k, v, out, scale)  # powers of two: scaling q is exact


def test_views_into_packed_tensors_and_out():
    packed = torch.randn(2, 300, 3, 8, 64, device="cuda", dtype=torch.float16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    out = torch.empty(2, 8, 300, 64, device="cuda", dtype=torch.float16)
    assert evoattn.attention(q, k, v, out=out, strict=True) is out
    require_right(parse_shape("B=2,H=8,S=300,D=64,dtype=fp16,mask=full"), q, k, v, out)


def test_log_sum_exp():
    q, k, v = inputs(PREFILL)
    out, lse = evoattn.attention(q, k, v, **flags(PREFILL), return_lse=True, strict=True)
    require_right(PREFILL, q, k, v, out)
    scores = (q.double() @ k.double().repeat_interleave(4, 1).transpose(-1, -2)) * 128**-0.5
    scores.masked_fill_(~torch.ones(2048, 2048, dtype=torch.bool, device="cuda").tril(), -torch.inf)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=5e-4)


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
    from evoattn.ops.traced import attention_lse_op, attention_op

    small = parse_shape("B=1,H=4,S=200,D=64,dtype=fp16,mask=causal_upper_left,layout=bshd")
    for op in (attention_op, attention_lse_op):
        results = torch.library.opcheck(op, (*inputs(small), True, "upper_left", 0.2, False))
        assert set(results.values()) == {"SUCCESS"}


def test_autocast():
    q, k, v = (t.float() for t in inputs(PREFILL))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = evoattn.attention(q, k, v, **flags(PREFILL), strict=True)
    assert out.dtype == torch.bfloat16
    require_right(PREFILL, q.bfloat16(), k.bfloat16(), v.bfloat16(), out)


def test_a_block_serves_head_dims_that_flash_does_not():
    problem = parse_shape(SHAPES[-1])
    q, k, v = inputs(problem)
    expected = evoattn.attention(q, k, v, strict=True)
    with evoattn.sdpa():
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)
    require_right(problem, q, k, v, expected)


def test_gradients_and_masks_are_torchs():
    q, k, v = inputs(parse_shape("B=1,H=4,S=64,D=64,dtype=fp16,mask=full"))
    mask = torch.zeros(64, 64, device="cuda", dtype=torch.float16)
    with evoattn.sdpa(), torch.enable_grad():
        wanted = q.clone().requires_grad_()
        F.scaled_dot_product_attention(wanted, k, v).sum().backward()
        assert wanted.grad is not None
        assert torch.equal(
            F.scaled_dot_product_attention(q, k, v, mask), torch._C._nn.scaled_dot_product_attention(q, k, v, mask)
        )
    assert "mask tensor" in evoattn.explain(q, k, v, mask)


def first_call(folder: Path) -> dict[str, float]:
    """Seconds of the first and the second call, device time included, in a process of its own."""
    code = f"""
        import sys, time, json
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        import torch
        from stand_in import stand_in
        from evoattn.ops import current
        from evoattn.ops.attention import attention
        from evoattn.ops.platform import CudaPlatform
        from evoattn.ops.runtime import Runtime
        q = torch.randn(1, 16, 1024, 128, device="cuda", dtype=torch.bfloat16)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        torch.cuda.synchronize()
        times = []
        with current.use(Runtime(CudaPlatform(), stand_in, Path({str(folder)!r}))):
            for _ in range(2):
                started = time.perf_counter()
                attention(q, q, q, is_causal=True, strict=True)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
        print(json.dumps(dict(first=times[0], second=times[1], cupy="cupy" in sys.modules)))
    """
    said = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True)
    return json.loads(said.splitlines()[-1])


def test_first_calls(tmp_path):
    started = time.perf_counter()
    cold, warm = first_call(tmp_path), first_call(tmp_path)
    print(f"first process {cold}, second process {warm}, both in {time.perf_counter() - started:.1f} s")
    assert cold["first"] < 8  # NVRTC, CuPy's import and the check; 3 s are aimed at
    assert warm["first"] < 0.5  # 50 ms are aimed at, 0.21 s were measured on a rented H100
    assert not warm["cupy"]
