"""xFormers' operator: biases made by hand with the names of xFormers 0.0.35, and its own where it is there."""

from types import SimpleNamespace

import pytest
import torch

from evoattn.integrations import xformers as adapter
from tests.integrations.flash_attn_formula import Asked, drawn
from tests.integrations.serving_batch import DECODING, HEADS, MIXED, Batch, near

SCALE = 0.2


def bias_of(name, **fields):
    return type(name, (SimpleNamespace,), {})(**fields)


def tensors(rows=7, keys=12, kv_heads=HEADS):
    shapes = [(2, rows, HEADS, 64), (2, keys, kv_heads, 64), (2, keys, kv_heads, 64)]
    return [drawn(*shape, seed=seed, dtype=torch.float16) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    "bias, asked",
    [
        (None, {}),
        (bias_of("LowerTriangularFromBottomRightMask"), {"causal": True}),
        (bias_of("LowerTriangularFromBottomRightLocalAttentionMask", _window_size=4), {"causal": True, "past": 3}),
        (bias_of("LocalAttentionFromBottomRightMask", window_left=3, window_right=2), {"past": 3, "ahead": 2}),
    ],
)
def test_biases_over_whole_tensors(bias, asked):
    q, k, v = tensors()
    window = asked.pop("past", -1), asked.pop("ahead", -1)
    output, lse = adapter.attend(q, k, v, bias, SCALE)
    for b in range(2):
        expected, sums = Asked(SCALE, window_size=window, **asked).of(q[b], k[b], v[b])
        assert near(output[b], expected) and near(lse[b], sums)


def test_the_upper_left_mask_and_a_tensor():
    q, k, v = tensors()
    output, _ = adapter.attend(q, k, v, bias_of("LowerTriangularMask"), SCALE)
    assert near(output[0], Asked(SCALE, True).of(q[0], k[0, :7], v[0, :7])[0])
    hides = torch.zeros(2, HEADS, 7, 12, dtype=q.dtype)
    hides[..., 5:] = -torch.inf
    assert near(adapter.attend(q, k, v, hides, SCALE)[0][0], Asked(SCALE).of(q[0], k[0, :5], v[0, :5])[0])


@pytest.mark.parametrize("groups", [0, 1, 2])
def test_heads_that_are_one_head_seen_as_many(groups):
    """Without a copy: heads of K and V `[…, heads, head_dim]` with a stride of 0."""
    q, k, v = tensors(kv_heads=max(1, groups))
    if groups:
        k, v = (t[:, :, :, None].expand(-1, -1, -1, HEADS // groups, -1) for t in (k, v))
        out = adapter.attend(q.unflatten(2, (groups, -1)), k, v, None, SCALE)[0]
        assert out.shape == (2, 7, groups, HEADS // groups, 64)
        k, v = (t[:, :, :, 0] for t in (k, v))
    else:
        out = adapter.attend(q, *(t.expand(-1, -1, HEADS, -1) for t in (k, v)), None, SCALE)[0]
    assert near(out.reshape(q.shape)[1], Asked(SCALE).of(q[1], k[1], v[1])[0])
    assert adapter.without_groups(k, True).shape[2] == max(1, groups)


@pytest.mark.parametrize("kind", ["", "PaddedKeys", "GappyKeys"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(kind, causal):
    batch = Batch(MIXED)
    room = 48 if kind == "PaddedKeys" else 0
    starts, keys = [0], []
    for i, length in enumerate(batch.lengths):
        keys.append(torch.stack(batch.keys(i)))
        behind = room or length + (3 if kind else 0)
        keys.append(torch.full_like(keys[-1][:, :1], torch.nan).expand(-1, behind - length, -1, -1))
        starts.append(starts[-1] + behind)
    k, v = torch.cat(keys, dim=1)
    used = {"seqlen": batch.used} if kind else {}
    bias = bias_of(
        "BlockDiagonal" + ("Causal" * causal) + kind + "Mask",
        q_seqinfo=SimpleNamespace(seqstart=batch.bounds, max_seqlen=max(batch.queries)),
        k_seqinfo=SimpleNamespace(seqstart=torch.tensor(starts).int(), max_seqlen=max(batch.lengths), **used),
    )
    output, lse = adapter.attend(batch.q[None], k[None], v[None], bias, SCALE)
    expected, sums = batch.expected(Asked(SCALE, causal))
    assert near(output[0], expected) and near(lse[0], sums)


@pytest.mark.parametrize("queries", [DECODING, MIXED])
def test_pages(queries):
    batch = Batch(queries)
    bias = bias_of(
        "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
        q_seqinfo=SimpleNamespace(seqstart=batch.bounds, max_seqlen=max(queries)),
        k_seqinfo=SimpleNamespace(seqlen=batch.used),
        block_tables=batch.table,
        page_size=batch.page,
    )
    k, v = (cache.flatten(0, 1)[None] for cache in (batch.k, batch.v))
    output, lse = adapter.attend(batch.q[None], k, v, bias, SCALE)
    expected, sums = batch.expected(Asked(SCALE, True))
    assert near(output[0], expected) and near(lse[0], sums)


@pytest.mark.parametrize("library", [adapter.XFORMERS, adapter.MSLK])
def test_the_library_takes_it(library):
    fmha = pytest.importorskip(library, exc_type=ImportError)
    attn_bias, op = fmha.attn_bias, adapter.op(library)
    q, k, v = tensors(12, 12)
    out = fmha.memory_efficient_attention_forward(q, k, v, attn_bias.LowerTriangularMask(), scale=SCALE, op=op)
    assert near(out[0], Asked(SCALE, True).of(q[0], k[0], v[0])[0])
    bias = attn_bias.BlockDiagonalCausalFromBottomRightMask.from_seqlens([3, 9], [3, 9])
    out = fmha.memory_efficient_attention_forward(q[:1], k[:1], v[:1], bias, scale=SCALE, op=op)
    assert near(out[0, 3:], Asked(SCALE, True).of(q[0, 3:], k[0, 3:], v[0, 3:])[0])
    with pytest.raises(ValueError, match="evoattn"):
        fmha.memory_efficient_attention_forward(*(t.double() for t in (q, k, v)), op=op)
