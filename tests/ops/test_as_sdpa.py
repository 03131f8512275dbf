"""At the edges the op does what SDPA does: the same answers, and exceptions of the same type."""

import pytest
import torch
import torch.nn.functional as F

import evoattn
from evoattn.ops.arguments import needs_copy
from evoattn.ops.runtime import Runtime, current
from tests.ops.edge_calls import Calls, difference, outcome, torchs

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
    expected = torchs(calls[name])
    with current.use(Runtime(None, current.best_known, tmp_path)):
        assert difference(outcome(evoattn.attention, calls[name]), expected) == ""
        assert difference(outcome(through_block, calls[name]), expected) == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_with_kernels(device, calls, name):
    expected = torchs(calls[name])
    assert difference(outcome(evoattn.attention, calls[name]), expected) == ""
    assert device.launches or name not in SERVED
    assert difference(outcome(through_block, calls[name]), expected) == ""


def negated(place):
    """The tensors of a call, one of them a view that is negated when it is read, as `z.conj().imag` is."""
    tensors = list(Calls("cpu").qkv())
    tensors[place] = torch._neg_view(tensors[place])
    return tuple(tensors)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_negated_view_is_read_as_one(device, place):
    call = negated(place), {}
    assert difference(outcome(evoattn.attention, call), outcome(F.scaled_dot_product_attention, call)) == ""
    with pytest.raises(evoattn.NoKernel, match="negation"):
        evoattn.attention(*call[0], strict=True)


def test_a_negated_bias_is_read_as_one(device):
    q, k, v = Calls("cpu").qkv()
    bias = torch._neg_view(torch.randn(9, 13).half())
    expected = F.scaled_dot_product_attention(q, k, v, bias.resolve_neg())
    assert difference(evoattn.attention(q, k, v, bias=bias), expected) == ""


def test_a_tensor_whose_memory_was_freed_reaches_no_kernel(device):
    """As FSDP frees that of parameters."""
    q, k, v = Calls("cpu").qkv()
    evoattn.attention(q, k, v, strict=True)
    k = k.clone()
    k.untyped_storage().resize_(0)
    with pytest.raises(evoattn.NoKernel, match="no memory"):
        evoattn.attention(q, k, v, strict=True)


def test_sinks_whose_memory_was_freed_reach_no_kernel(device):
    q, k, v = Calls("cpu").qkv()
    sinks = torch.zeros(q.shape[1]).half()
    evoattn.attention(q, k, v, sinks=sinks, strict=True)
    launched = len(device.launches)
    sinks.untyped_storage().resize_(0)
    with pytest.raises(evoattn.NoKernel) as raised:
        evoattn.attention(q, k, v, sinks=sinks, strict=True)
    del sinks  # a failure of this test would print it, and end the process
    assert "no memory" in str(raised.value) and len(device.launches) == launched


@pytest.mark.parametrize("words", [{}, {"window": (3, 3)}])
def test_an_out_over_a_part_of_an_input_is_seen_whoever_made_it(device, words):
    k, v = (torch.randn(2, 3, 16, 64).half() for _ in "kv")
    memory = torch.randn(3, 3, 16, 64).half()
    expected = evoattn.attention(memory[:2].clone(), k, v, **words)
    out = torch.from_dlpack(memory[1:])
    assert needs_copy(out, memory[:2]) and not needs_copy(out, k, v)
    assert evoattn.attention(memory[:2], k, v, out=out, **words) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("words", [{}, {"window": (3, 3)}])
def test_a_negated_out_reads_as_the_answer(device, words):
    q, k, v = Calls("cpu").qkv()
    out = torch._neg_view(torch.empty_like(q))
    assert evoattn.attention(q, k, v, out=out, **words) is out
    assert difference(out.resolve_neg(), evoattn.attention(q, k, v, **words)) == ""
    assert device.launches


@pytest.mark.parametrize("shape", [(), (1,), (13,)], ids=str)
def test_a_bias_of_few_dimensions_is_broadcast(device, tmp_path, shape):
    q, k, v = Calls("cpu").qkv()
    bias = torch.arange(13.0).half()[: shape[0] if shape else 1].view(shape)
    expected = outcome(F.scaled_dot_product_attention, ((q, k, v, bias.expand(9, 13)), {}))
    assert difference(evoattn.attention(q, k, v, bias=bias, strict=True), expected) == ""
    with current.use(Runtime(None, current.best_known, tmp_path)):
        assert difference(evoattn.attention(q, k, v, bias=bias), expected) == ""
