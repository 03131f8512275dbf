"""The backend: tensors changed in place, launches in order, every way to fail."""

import pytest
import torch

from evoattn.backends.base import LaunchError
from evoattn.backends.interpreter import InterpreterBackend, NotInterpreted
from evoattn.model.launch import Buffer, KernelLaunch, Scalar
from tests.support.compiles import ptx_kept

SOURCE = """
extern "C" __global__ void scale(float* o, const float* q, int n, long stride, float factor) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) o[i * stride] = q[i] * factor;
}
extern "C" __global__ void accumulate(float* o, float* partial, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) { partial[i] = o[i] + 1; o[i] = partial[i] * 2; }
}
extern "C" __global__ void exchange(float* o) {
  extern __shared__ float tile[];
  tile[threadIdx.x] = o[threadIdx.x];
  o[threadIdx.x] = tile[threadIdx.x ^ 1];
}
extern "C" __global__ void clock_of(float* o) { o[0] = clock(); }
extern "C" __global__ void __launch_bounds__(64) bounded(float* o) { o[threadIdx.x] = 1; }
"""


@pytest.fixture(scope="module")
def compiled():
    return ptx_kept(SOURCE, "sm_80")


def launch(kernel, *args, block=64, smem=0, cluster=(1, 1, 1), grid=(2, 1, 1)):
    return KernelLaunch(kernel, grid, (block, 1, 1), smem, args, cluster)


def scale(n=100, stride=1):
    return launch(
        "scale", Buffer("o"), Buffer("q"), Scalar("int32", n), Scalar("int64", stride), Scalar("float32", 0.1)
    )


def test_launches_run_in_order_over_the_tensors_themselves(compiled):
    buffers = {
        "q": torch.randn(100),
        "o": torch.full((100,), float("nan")),
        "partial": torch.zeros(400, dtype=torch.uint8),
    }
    accumulate = launch("accumulate", Buffer("o"), Buffer("partial"), Scalar("int32", 100))
    q = buffers["q"].clone()
    assert InterpreterBackend().run(compiled, (scale(), accumulate), buffers) == ()
    factor = torch.tensor(0.1, dtype=torch.float32)
    assert torch.equal(buffers["o"], (q * factor + 1) * 2) and torch.equal(buffers["q"], q)
    assert torch.equal(buffers["partial"].view(torch.float32), q * factor + 1)


def test_half_tensors_are_bytes_like_any_other(compiled):
    buffers = {"q": torch.ones(200, dtype=torch.float16), "o": torch.zeros(200, dtype=torch.bfloat16)}
    assert InterpreterBackend().run(compiled, (scale(),), buffers) == ()
    assert torch.equal(buffers["o"].view(torch.float32), buffers["q"].view(torch.float32) * torch.tensor(0.1))


def test_faults_are_sentences(compiled):
    buffers = {"q": torch.zeros(100), "o": torch.zeros(100)}
    [fault] = InterpreterBackend().run(compiled, (scale(stride=2), scale()), buffers)
    assert 'buffer "o"' in fault and fault.endswith(".") and "\n" not in fault
    [fault] = InterpreterBackend().run(
        compiled, (launch("exchange", Buffer("o"), smem=256, grid=(1, 1, 1)),), {"o": torch.zeros(64)}
    )
    assert fault.startswith("Race in shared memory")


def test_what_is_not_whitelisted_is_not_interpreted(compiled):
    with pytest.raises(NotInterpreted, match="clock"):
        InterpreterBackend().run(compiled, (launch("clock_of", Buffer("o")),), {"o": torch.zeros(1)})
    with pytest.raises(NotInterpreted, match="along x alone"):
        InterpreterBackend().run(
            compiled, (launch("exchange", Buffer("o"), cluster=(1, 2, 1), grid=(2, 2, 1)),), {"o": torch.zeros(64)}
        )


@pytest.mark.parametrize(
    "wrong, message",
    [
        (launch("scale", Buffer("o")), "takes 5 arguments"),
        (launch("nothing"), "no kernel nothing"),
        (launch("exchange", Buffer("o"), block=1025), "cannot be launched"),
        (launch("exchange", Buffer("o"), smem=1 << 20), "shared memory"),
        (launch("exchange", Buffer("elsewhere")), "elsewhere"),
        (launch("exchange", Buffer("o"), cluster=(4, 1, 1)), "in clusters of"),
        (launch("bounded", Buffer("o"), block=96), "96, 1, 1. threads is over the 64 of the launch bounds"),
    ],
)
def test_impossible_launches(compiled, wrong, message):
    with pytest.raises(LaunchError, match=message):
        InterpreterBackend().run(compiled, (wrong,), {"o": torch.zeros(64)})


def test_profile_counts_all_launches(compiled):
    buffers = {"q": torch.zeros(128), "o": torch.zeros(128)}
    one = InterpreterBackend().profile(compiled, (scale(128),), buffers)
    assert InterpreterBackend().profile(compiled, (scale(128), scale(128)), buffers) == one * 2
    assert one.global_bytes == 2 * 128 * 4 and one.fp32 == 4 and one.global_sectors == 2 * 16
