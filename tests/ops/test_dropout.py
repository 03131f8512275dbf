"""`dropout_p`, `attn_mask` and `is_causal` of `evoattn.attention` have the places that they have in SDPA, and with
dropout SDPA answers."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from evoattn.ops.attention import attention
from evoattn.ops.explain import explain
from evoattn.ops.sdpa import capture, sdpa
from evoattn.ops.torch_answer import NoKernel
from tests.ops.fake_device import tensors


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
