"""The op on a GPU in CUDA graphs, under `torch.compile`, on streams, threads and devices. Kernels whose blocks wait
for one another, where these do not all run at once: beside launches of other streams, and beside one that keeps most
of the SMs."""

import ctypes
import time

import pytest
import torch
import torch.nn.functional as F

import evoattn
from evoattn.backends.platform import CudaPlatform
from evoattn.families.registry import load_space
from evoattn.model.shape_text import parse_shape
from evoattn.ops.runtime import Runtime, current
from tests.ops.fake_device import WGMMA, Pick
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


MERGED = {**WGMMA, "STAGES": 2, "OVERLAP": True, "GROUP_ROWS": True}
BALANCED = WGMMA | {"BLOCK_M": 128, "STAGES": 2, "PRODUCER": "warpgroup", "OVERLAP": True, "SCHEDULE": "balanced"}
KERNELS = {
    "B=1,H=32,Hkv=8,Sq=4,Sk=4096,D=128,dtype=bf16,mask=causal_lower_right": MERGED | {"KEY_SPLIT": 16},
    "B=1,H=28,Hkv=4,Sq=8,Sk=8000,D=128,dtype=fp16,mask=full": MERGED | {"KEY_SPLIT": 32},
    "B=2,H=16,Hkv=8,Sq=16,Sk=3000,D=64,dtype=bf16,mask=full": MERGED | {"KEY_SPLIT": 8},
    "B=5,H=9,S=500,D=128,dtype=bf16,mask=full": BALANCED,
    "B=6,H=8,Sq=448,Sk=4571,D=128,dtype=bf16,mask=full": BALANCED,  # gangs of four
}
SHAPES = list(KERNELS)
HELD = 128
"""SMs that the other launch keeps, of an H100's 132."""
HOLD = r"""
extern "C" __global__ void hold(volatile int* release) {
  extern __shared__ char smem[];
  const long long begin = clock64();
  while (*release == 0 && clock64() - begin < 8000000000ll) __nanosleep(1000);
}
"""


def pick(problem, gpu):
    """The kernel that the test has for a problem."""
    genes = next(
        (genes for shape, genes in KERNELS.items() if parse_shape(shape).with_(lse=problem.lse) == problem), {}
    )
    return Pick("flash_wgmma", load_space("flash_wgmma", gpu).make_config(genes)) if genes else None


@pytest.fixture(autouse=True, scope="module")
def kernels(tmp_path_factory):
    with current.use(Runtime(CudaPlatform(), pick, tmp_path_factory.mktemp("kernels"))), torch.no_grad():
        yield


def call(shape, tensors):
    return evoattn.attention(*tensors, **flags(parse_shape(shape)), strict=True)


def test_many_streams_at_once_are_right():
    """Eight streams of two priorities, each with all kernels in an order of its own."""
    cases = [(shape, inputs(parse_shape(shape))) for shape in SHAPES]
    expected = [call(*case) for case in cases]
    for (shape, tensors), out in zip(cases, expected, strict=True):
        require_right(parse_shape(shape), *tensors, out)
    streams = [torch.cuda.Stream(priority=-(i % 2)) for i in range(8)]
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    sums = [torch.zeros_like(wrong) for _ in streams]
    for turn in range(200):
        for i, stream in enumerate(streams):
            which = (turn + i) % len(cases)
            with torch.cuda.stream(stream):
                sums[i] += (call(*cases[which]) != expected[which]).sum()
    torch.cuda.synchronize()
    assert sum(int(found) for found in sums) == 0


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_properties(0).multi_processor_count <= HELD,
    reason="too few SMs to keep so many",
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_launch_ends_while_another_keeps_most_of_the_sms(shape):
    """With four SMs left, 16 or 32 blocks that wait for one another never run at once."""
    cupy = pytest.importorskip("cupy")
    hold = cupy.RawKernel(HOLD, "hold")
    hold.max_dynamic_shared_size_bytes = 200 * 1024  # a block fills its SM
    release = cupy.cuda.alloc_pinned_memory(4)
    word = ctypes.c_int.from_address(release.ptr)
    tensors = inputs(parse_shape(shape))
    expected = call(shape, tensors)
    held, ours = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(ours):
        call(shape, tensors)  # its stream's scratch memory
    torch.cuda.synchronize()
    word.value = 0
    try:
        with cupy.cuda.ExternalStream(held.cuda_stream):
            hold((HELD,), (32,), (ctypes.c_void_p(release.ptr).value,), shared_mem=200 * 1024)
        time.sleep(0.02)
        with torch.cuda.stream(ours):
            answer = call(shape, tensors)
        until = time.monotonic() + 2
        while not ours.query() and time.monotonic() < until:
            time.sleep(0.001)
        assert not held.query(), "the other launch still keeps its SMs"
        assert ours.query(), "the launch waits for blocks that have no SM"
    finally:
        word.value = 1
        torch.cuda.synchronize()
    assert torch.equal(answer, expected)
