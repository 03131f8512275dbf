"""At the edges the op does what SDPA does: the same answers, exceptions of the same type, the same places of
`dropout_p`, `attn_mask` and `is_causal`; with dropout SDPA answers."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

import evoattn
from evoattn.ops.arguments import needs_copy
from evoattn.ops.attention import attention
from evoattn.ops.explain import explain
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.sdpa import capture, sdpa
from evoattn.ops.torch_answer import NoKernel
from tests.ops.edge_calls import Calls, difference, outcome, torchs
from tests.ops.fake_device import tensors

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


def dropouts():
    q, k, v = tensors()
    mask = torch.rand(37, 45) > 0.3
    yield "positional", (q, k, v, None, 0.5, True), {}
    yield "keyword", (q, k, v), dict(dropout_p=0.5, scale=0.1)
    yield "mask", (q, k, v, mask), dict(dropout_p=0.25)
    yield "causal mask", (q, k, v, causal_lower_right(37, 45)), dict(dropout_p=0.25)


@pytest.mark.parametrize(("args", "words"), [pytest.param(a, w, id=name) for name, a, w in dropouts()])
def test_dropout_has_the_place_and_the_answer_that_it_has_in_sdpa(device, args, words):
    torch.manual_seed(0)
    expected = F.scaled_dot_product_attention(*args, **words, enable_gqa=True)
    with sdpa():
        torch.manual_seed(0)
        assert torch.equal(attention(*args, **words, enable_gqa=True), expected)
    torch.manual_seed(0)
    out = torch.empty_like(expected)
    assert attention(*args, **words, enable_gqa=True, out=out) is out
    assert torch.equal(out, expected)
    assert not device.launches
    with pytest.raises(NoKernel, match="dropout"):
        attention(*args, **words, enable_gqa=True, strict=True)
    with capture() as shapes:
        attention(*args, **words, enable_gqa=True)
    assert shapes.missed == {"it has dropout": 1}


@pytest.mark.parametrize(
    "words", [dict(window=(3, 0)), dict(return_lse=True), dict(causal="lower_right"), dict(bias=torch.zeros(37, 45))]
)
def test_dropout_beside_what_sdpa_lacks_is_refused(words):
    with pytest.raises(ValueError, match="dropout_p goes with the arguments of SDPA alone"):
        attention(*tensors(), dropout_p=0.5, enable_gqa=True, **words)
    with pytest.raises(ValueError, match="dropout_p goes with the arguments of SDPA alone"):
        explain(*tensors(), dropout_p=0.5, enable_gqa=True, **words)


def test_a_query_that_sees_no_key_has_the_output_zero():
    q, k, v = tensors(seqlen_q=9, seqlen_k=3)
    answer = attention(q, k, v, causal_lower_right(9, 3), 0.5, enable_gqa=True)
    assert not answer[:, :, :6].any() and answer.isfinite().all()


@pytest.mark.parametrize("rows", [(5, 0), (0, 4)], ids=["no keys", "no queries"])
def test_tensors_without_elements_are_kept_from_torchs_kernels(rows):
    q, k, v = tensors(seqlen_q=rows[0], seqlen_k=rows[1])
    assert not attention(q, k, v, dropout_p=0.5, enable_gqa=True).any()


def test_a_mask_and_is_causal_have_the_places_that_they_have_in_sdpa():
    q, k, v = tensors()
    mask = torch.rand(37, 45) > 0.3
    expected = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    assert torch.equal(attention(q, k, v, mask, enable_gqa=True), expected)
    expected = F.scaled_dot_product_attention(q, k, v, None, 0.0, True, enable_gqa=True)
    assert torch.equal(attention(q, k, v, None, 0.0, True, enable_gqa=True), expected)


@pytest.mark.slow
def test_compiled_code_has_dropout_without_a_break():
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, dropout_p=0.5, enable_gqa=True), fullgraph=True, backend="eager"
    )
    q, k, v = tensors()
    torch.manual_seed(0)
    expected = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True)
    torch.manual_seed(0)
    assert torch.equal(compiled(q, k, v), expected)
