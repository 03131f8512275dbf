"""Variants of attention: how they are written, which exclude each other, what the reference makes of them."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from evoattn.correctness import reference
from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.shape_text import parse_shape

SHAPE = "B=2,H=4,Hkv=2,Sq=37,Sk=53,D=24"


@pytest.mark.parametrize(
    "text, changes, words",
    [
        ("scale=0.1", {"scale": 0.1}, "scale=0.1"),
        ("window=128:0", {"window": "128:0"}, "window=128:0"),
        ("softcap=50", {"softcap": 50}, "softcap=50"),
        ("sink=1", {"sink": True}, "sink"),
        ("alibi=true", {"alibi": True}, "alibi"),
        ("seqused=0:50", {"seqused": "0:50"}, "seqused=0:50"),
        ("seqused=log:1:50,page=16", {"seqused": "log:1:50", "page": 16}, "seqused=log:1:50 page=16"),
        ("bias=HS", {"bias": "hs"}, "bias=hs"),
        ("blocks=BH:64x32:30+70", {"blocks": "bh:64x32:30+70"}, "blocks=bh:64x32:30+70"),
        ("dv=16", {"value_dim": 16}, "D=24 Dv=16 fp16 full"),
        ("Dv=16,shared_kv=1", {"value_dim": 16, "shared_kv": True}, "Dv=16 fp16 full shared_kv"),
        ("Dv=16,rotary_apart=1", {"value_dim": 16, "rotary_apart": True}, "Dv=16 fp16 full rotary_apart"),
        (
            "mask=causal,window=9:0,sink=1",
            {"mask": "causal_upper_left", "window": "9:0", "sink": True},
            "window=9:0 sink",
        ),
    ],
)
def test_a_variant_is_written_read_and_kept(text, changes, words):
    plain, problem = parse_shape(SHAPE), parse_shape(f"{SHAPE},{text}")
    assert problem == plain.with_(**changes) != plain
    assert problem.describe().endswith(words)
    assert AttentionProblem(**problem.to_dict()) == problem
    assert problem.short_name() != plain.short_name() and problem.short_name().replace("_", "").isalnum()


def test_records_without_variants_are_read_as_before():
    record = parse_shape(SHAPE).to_dict()
    assert not {"scale", "window", "softcap", "sink", "alibi", "bias", "lse"} & set(record)
    assert AttentionProblem(**record).variants == ()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"seqused": "0:20", "page": 16.0}, "page must be one of"),
        ({"dtype": ["fp16"]}, "dtype must be one of"),
        ({"seqlen_q": 1 << 20, "seqlen_k": 1 << 20, "bias": "s"}, "1048576, 1048576. takes more than 64 GiB"),
    ],
)
def test_what_no_text_of_a_shape_says_is_refused_too(changes, words):
    with pytest.raises(ProblemError, match=words):
        parse_shape(SHAPE).with_(**changes)


def test_a_head_dim_of_v_counts_in_shapes_flops_and_bytes():
    plain = parse_shape(SHAPE)
    assert plain.with_(value_dim=24) == plain.with_(value_dim=None) == plain
    own = plain.with_(value_dim=16, layout="bshd")
    assert (own.shape("k"), own.shape("v"), own.shape("o")) == ((2, 2, 53, 24), (2, 2, 53, 16), (2, 4, 37, 16))
    assert own.strides("v") == (53 * 2 * 16, 16, 2 * 16, 1)
    assert own.flops == 2 * (24 + 16) * 2 * 4 * 37 * 53
    assert own.bytes == 2 * (2 * 4 * 37 * (24 + 16) + 2 * 2 * 53 * (24 + 16))
    shared = own.with_(shared_kv=True, layout="bshd")
    assert shared.strides("v") == shared.strides("k") == (53 * 2 * 24, 24, 2 * 24, 1)
    assert own.bytes - shared.bytes == 2 * 2 * 2 * 53 * 16
    assert set(reference.make_inputs(shared, 1, "cpu")) == {"q", "k"}


@pytest.mark.parametrize("where", ["", "shared_kv", "rotary_apart"])
def test_the_reference_of_a_head_dim_of_v(where):
    problem = parse_shape(f"{SHAPE},Dv=16,mask=causal").with_(**({where: True} if where else {}))
    tensors = reference.make_inputs(problem, 3, "cpu")
    q, k = tensors["q"].double(), tensors["k"].double()
    v = k[..., :16] if problem.shared_kv else tensors["v"].double()
    k = torch.cat((v, k), -1) if problem.rotary_apart else k
    expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert expected.shape == problem.shape("o")
    torch.testing.assert_close(reference.make_answer(problem, tensors, double=True)["o"].values, expected)


def matrix(problem: AttentionProblem, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The whole of the mask and the terms, as a tensor that SDPA adds; written apart from the reference."""
    p, added = problem, torch.zeros(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k).double()
    for i in range(p.seqlen_q):
        lower_right = i + p.seqlen_k - p.seqlen_q
        middle = i if p.mask == "causal_upper_left" else lower_right
        for j in range(p.seqlen_k):
            hidden = p.mask != "full" and j > middle
            if p.window:
                past, ahead = map(int, p.window.split(":"))
                hidden |= not middle - past <= j <= middle + ahead
            if p.alibi:
                added[:, :, i, j] -= tensors["slopes"].double() * abs(j - middle)
            if p.bias:
                added[:, :, i, j] += tensors["bias"][..., i, j].double()
            if hidden:
                added[:, :, i, j] = float("-inf")
    return added


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["full", "causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize(
    "fields",
    [
        {"window": "9:0"},
        {"alibi": True},
        {"bias": "bhs"},
        {"bias": "s", "window": "60:0"},
        {"bias": "hs"},
        {"bias": "bs"},
    ],
)
def test_the_reference_is_sdpa_with_a_matrix(mask, fields):
    problem = parse_shape(SHAPE).with_(mask=mask, scale=0.3, **fields)
    tensors = reference.make_inputs(problem, 3, "cpu", "extreme_terms")
    q, k, v = (tensors[t].double() for t in "qkv")
    added = matrix(problem, tensors)
    seen = ~torch.isneginf(added).all(-1, keepdim=True)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=added, scale=0.3, enable_gqa=True)
    exact = reference.exact_attention(problem, *(tensors[t] for t in "qkv"), torch.float64, others=tensors)
    torch.testing.assert_close(exact, torch.where(seen, expected, 0.0), rtol=1e-12, atol=1e-12)


def test_the_reference_s_softcap_and_sinks():
    problem = parse_shape(SHAPE).with_(softcap=2.0, sink=True, mask="causal_lower_right", lse=True)
    tensors = reference.make_inputs(problem, 3, "cpu", "large_logits")
    q, k, v = (tensors[t].double() for t in "qkv")
    scores = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 24**0.5
    scores = (torch.tanh(scores / 2) * 2).exp()
    scores = scores * torch.ones(37, 53).tril(16)
    sums = scores.sum(-1, keepdim=True) + tensors["sinks"].double().exp()[:, None, None]
    answer = reference.make_answer(problem, tensors, double=True)
    torch.testing.assert_close(answer["o"].values, scores / sums @ v.repeat_interleave(2, 1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(answer["lse"].values, sums[..., 0].log(), rtol=1e-12, atol=1e-12)


def test_a_sink_of_minus_infinity_is_none():
    problem = parse_shape(SHAPE).with_(sink=True, mask="causal_upper_left", seqlen_q=60)
    tensors = reference.make_inputs(problem, 3, "cpu", "extreme_terms")
    with_sink = reference.exact_attention(problem, *(tensors[t] for t in "qkv"), torch.float64, others=tensors)
    without = reference.exact_attention(problem.with_(sink=False), *(tensors[t] for t in "qkv"), torch.float64)
    assert torch.equal(with_sink[:, ::2], without[:, ::2])
    assert with_sink[:, 1::2].abs().max() < 1e-6  # e^100 in the sum


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_a_family_refuses_what_it_does_not_serve_and_takes_every_scale(family):
    gpu = GPUS["h100"]
    if "merge" in family.operations:
        pytest.skip("merges have none: such problems are refused")
    plain = AttentionProblem(1, 8, 2, 256, 256, 64, op=family.operations[0])
    if family.dtypes == ("e4m3",):
        plain = plain.with_(dtype="e4m3")
    elif family.why_unsupported(plain, gpu):
        plain = plain.with_(dtype=family.dtypes[-1], head_dim=1024)
    if not family.plain and plain.dtype != "e4m3":
        plain = plain.with_(head_dim=576, value_dim=512, shared_kv=True)
    for field, value in {"window": "5:5", "softcap": 1.0, "sink": True, "alibi": True, "bias": "s"}.items():
        reason = family.why_unsupported(plain.with_(**{field: value}), gpu)
        refused = f"{family.name} does not serve {field}; take it out of the shape, or another family."
        assert reason == (None if field in family.variants else refused)
    assert family.why_unsupported(plain.with_(scale=2.0), gpu) is None
