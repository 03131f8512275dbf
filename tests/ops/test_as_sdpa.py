"""At the edges the op does what SDPA does: the same answers, and exceptions of the same type."""

import pytest
import torch.nn.functional as F
from edge_calls import Calls, difference, outcome

import evoattn
from evoattn.ops import current
from evoattn.ops.runtime import Runtime

NAMES = sorted(Calls("cpu").all())
SERVED = {"plain", "4 dimensions", "4 dimensions, causal", "2 K/V heads, True", "head_dim 72", "head_dim 32 of v"}
SERVED |= {"nan in k, causal", "mask bool", "mask a hidden row", "mask number", "mask [2, 1, 1, 13]"}
"""Some that a kernel answers."""


def through_block(*arguments, **words):
    with evoattn.sdpa():
        return F.scaled_dot_product_attention(*arguments, **words)


@pytest.fixture(scope="module")
def calls():
    return Calls("cpu").all()


@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu(tmp_path, calls, name):
    torchs = outcome(F.scaled_dot_product_attention, calls[name])
    with current.use(Runtime(None, current.best_known, tmp_path)):
        assert difference(outcome(evoattn.attention, calls[name]), torchs) == ""
        assert difference(outcome(through_block, calls[name]), torchs) == ""


@pytest.mark.parametrize("name", NAMES)
def test_with_kernels(device, calls, name):
    torchs = outcome(F.scaled_dot_product_attention, calls[name])
    assert difference(outcome(evoattn.attention, calls[name]), torchs) == ""
    assert device.launches or name not in SERVED
    assert difference(outcome(through_block, calls[name]), torchs) == ""
