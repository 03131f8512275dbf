"""What `capture` times on a GPU: the calls themselves, plain ones and variants."""

import torch

import evoattn
from tests.ops.gpu.gpu_problems import ON_A_GPU, PREFILL, flags, inputs

pytestmark = ON_A_GPU


def test_calls_are_timed(runtime):
    """A call of a variant takes about as long as the plain one of the same size, here more than 10 µs; two events with
    nothing in between are 1 to 5 µs apart."""
    q, k, v = inputs(PREFILL)
    words = flags(PREFILL)
    with evoattn.capture() as shapes:
        for _ in range(20):
            evoattn.attention(q, k, v, **words, strict=True)
            evoattn.attention(q, k, v, **words, softcap=30.0, strict=True)
    torch.cuda.synchronize()
    times = {entry.problem.softcap: entry.us for entry in shapes.entries}
    assert set(times) == {0.0, 30.0} and [entry.count for entry in shapes.entries] == [20, 20]
    assert min(times.values()) > 10
