"""Rows have the same bits in every batch on a GPU; and a comparison without the promise finds rows that differ."""

import pytest
import torch

from benchmarks.calls.same_bits import KINDS, differences
from evoattn.backends.platform import CudaPlatform
from evoattn.ops.runtime import Runtime, current
from tests.ops.gpu.gpu_problems import ON_A_GPU

pytestmark = ON_A_GPU
NAMES = ("llama", "gpt-oss, window")


@pytest.fixture(autouse=True)
def shipped_picks(folder):
    """The stand-in rule of the other tests knows no kernel of the promise."""
    with current.use(Runtime(CudaPlatform(), current.best_known, folder)):
        yield


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="elsewhere no kernel of the promise writes the log-sum-exp",
)
def test_a_row_has_the_same_bits_in_all_surroundings(name):
    found = list(differences(KINDS[name], seed=2, count=6))
    assert len(found) >= 9 and not [where for where, _, other, _ in found if other]


def test_without_the_promise_rows_differ():
    assert sum(other for _, _, other, _ in differences(KINDS["llama"], seed=2, count=6, promised=False))
