"""A mask's own knowledge, held against a matrix of booleans; and a row that no family knows. Block lists: how they are
written, what they are drawn as, and that what is counted of them is what the reference shows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evoattn.correctness import reference
from evoattn.correctness.reference import exact_attention, exact_lse, make_inputs
from evoattn.correctness.sequences import NO_BLOCK, make_block_terms, visible
from evoattn.model.block_list import BlockRow, blocks_of_rows, draw
from evoattn.model.mask import MASKS, Mask, MaskKind
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.shape_text import parse_shape
from tests.added_mask import added

WINDOW = Mask("window", past=5, ahead=0, corner="lower_right")
sides = st.none() | st.integers(-3, 12)
lengths = st.integers(1, 40)
bands = st.builds(
    Mask, st.just("band"), st.none() | st.integers(0, 12), sides, st.sampled_from(["upper_left", "lower_right"])
)


def matrix(mask: Mask, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """Which keys each query sees, from the sentence at the top of `mask.py`."""
    queries, keys = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    diagonal = queries + (seqlen_k - seqlen_q if mask.corner == "lower_right" else 0)
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if mask.past is not None:
        visible &= keys >= diagonal - mask.past
    if mask.ahead is not None:
        visible &= keys <= diagonal + mask.ahead
    return visible


@pytest.mark.slow
@given(bands.filter(lambda m: m.past is None or m.ahead is None or m.past + m.ahead >= 0), lengths, lengths)
def test_a_band_counts_what_its_matrix_shows(mask, seqlen_q, seqlen_k):
    visible = matrix(mask, seqlen_q, seqlen_k)
    band = mask.band(seqlen_q, seqlen_k)
    assert band.pairs == int(visible.sum())
    seen = torch.as_tensor(band.sees(torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)))
    assert seen.expand(seqlen_q, seqlen_k).equal(visible)
    for first in range(0, seqlen_q, 7):
        seen = visible[first : first + 7].any(0).nonzero().flatten().tolist()
        keys = band.keys(first, min(first + 7, seqlen_q))
        assert list(keys) == seen


@given(lengths, lengths)
def test_fewest_queries_that_see_the_last_key(seqlen_k, seqlen_q):
    for mask in MASKS.values():
        sees = bool(matrix(mask, seqlen_q, seqlen_k)[:, -1].any())
        assert sees == (seqlen_q >= mask.queries_to_see_all(seqlen_k))


def test_the_rows_of_the_table():
    assert [mask.kind for mask in MASKS.values()] == [MaskKind.FULL, MaskKind.CAUSAL, MaskKind.CAUSAL]
    assert MASKS["full"].constants() == {"CAUSAL": False, "CAUSAL_LOWER_RIGHT": False}
    assert MASKS["causal_upper_left"].constants() == {"CAUSAL": True, "CAUSAL_LOWER_RIGHT": False}
    assert MASKS["causal_lower_right"].constants() == {"CAUSAL": True, "CAUSAL_LOWER_RIGHT": True}
    assert WINDOW.kind is MaskKind.BAND


def test_a_new_row_is_a_mask_everywhere_in_the_model():
    """Problem, shape, reference: all of them ask the table."""
    with pytest.raises(ProblemError, match="mask must be one of"):
        AttentionProblem(1, 1, 1, 9, 12, 8, mask="window")
    with added(WINDOW):
        problem = parse_shape("B=1,H=1,Sq=9,Sk=12,D=8,dtype=fp32,mask=window")
        visible = matrix(WINDOW, 9, 12)
        assert problem.visible_pairs == int(visible.sum())
        inputs = reference.make_inputs(problem, 0, "cpu")
        exact = reference.exact_attention(problem, *(inputs[t] for t in "qkv"), torch.float64)
        ours = torch.nn.functional.scaled_dot_product_attention(*(inputs[t].double() for t in "qkv"), attn_mask=visible)
        assert torch.allclose(exact, ours)
    assert "window" not in MASKS


SHAPE = "B=2,H=4,Hkv=2,Sq=200,Sk=133,D=16"
TEXTS = ["64x32:30+70", "b:64x32:100", "h:64x32:7+20+61:mixed", "bh:32x64:30+70:mixed", "128x128:1"]


def test_what_a_text_draws():
    problem = parse_shape("B=1,H=1,S=1000,D=16,blocks=128x128:300+700")
    ((rows,),) = draw(*problem.block_mask)
    assert rows[0] == BlockRow((2,), (0, 1)) and rows[2] == BlockRow((0, 1, 2, 3, 4, 5, 6, 7), ())
    assert rows[7] == BlockRow((2,), (3, 4, 5, 6, 7))
    assert {one.dtype for one in make_block_terms(problem, "cpu").values()} == {torch.int32}
    assert problem.visible_pairs == 300**2 + 700**2
    causal = problem.with_(mask="causal_upper_left")
    assert causal.visible_pairs == 300 * 301 // 2 + 700 * 701 // 2
    assert causal.flops == 2 * 32 * causal.visible_pairs


def test_keys_that_no_list_names_are_not_read():
    problem = parse_shape("B=1,H=1,Sq=100,Sk=1000,D=16,mask=causal,blocks=128x128:1000")
    whole = problem.with_(blocks="", seqlen_k=128)
    assert problem.bytes == whole.bytes


@pytest.mark.parametrize("mask", ["full", "causal", "causal_lower_right"])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("queries", [200, 90, 1])
def test_pairs_are_those_that_the_reference_shows(mask, text, queries):
    problem = parse_shape(f"B=2,H=4,Sq={queries},Sk=133,D=16,mask={mask},blocks={text}")
    tensors = make_inputs(problem, 1, "cpu")
    assert {name: tuple(tensors[name].shape) for name in problem.term_shapes} == problem.term_shapes
    total = 0
    for batch in range(2):
        shown = visible(problem, tensors, batch, slice(0, 4), slice(0, queries))
        total += int(shown.sum()) * (4 // shown.shape[0])
        if not text.endswith("mixed"):  # what the predicate alone shows
            rows, keys = (tensors[f"{name}_documents"] for name in ("query", "key"))
            one = min(batch, len(rows) - 1)
            band = problem.band.sees(torch.arange(queries)[:, None], torch.arange(133))
            assert torch.equal(shown[0], (rows[one][:, None] == keys[one]) & band)
    assert problem.visible_pairs == total


def test_counted_lists_and_a_predicate():
    written = "B=2 H=2 S=640 D=16 causal blocks=h:64x64:1/3/7 predicate=(t[b,q]!=t[b,k])|(q-k<99) tables=t:int32:2x640"
    problem = parse_shape(written)
    assert parse_shape(problem.describe()) == problem == AttentionProblem(**problem.to_dict())
    counts = [len(row.partial) + len(row.full) for row in draw(*problem.block_mask)[0][0]]
    assert counts == sorted(counts) and max(counts) == 7 and sum(counts) / len(counts) == pytest.approx(4, abs=0.3)
    assert problem.visible_pairs == 2 * 2 * 640 * 3.5 * 64
    tensors = make_inputs(problem, 1, "cpu")
    shown = visible(problem, tensors, 1, slice(0, 2), slice(0, 640))
    every = visible(problem.with_(predicate="", tables=""), tensors, 1, slice(0, 2), slice(0, 640))
    ids, at = tensors["own_t"][1], torch.arange(640)
    full = visible(problem.with_(predicate="q<0", tables=""), tensors, 1, slice(0, 2), slice(0, 640))
    assert torch.equal(shown, every & ((ids[:, None] != ids) | (at[:, None] - at < 99) | full))


def test_mixed_lists_are_not_what_the_predicate_gives_and_end_in_poison():
    problem = parse_shape("B=2,H=2,S=400,D=16,mask=causal,blocks=bh:32x32:90+45:mixed")
    tensors = make_inputs(problem, 1, "cpu")
    honest = make_inputs(problem.with_(blocks="bh:32x32:90+45"), 1, "cpu")
    seen, own = (visible(problem, t, 1, slice(0, 2), slice(0, 400)) for t in (tensors, honest))
    assert (seen & ~own).any() and (own & ~seen).any() and not torch.equal(seen[0], seen[1])
    counts = [tensors[f"{kind}kv_num_blocks"] for kind in ("", "full_")]
    assert all((counts[i] > 0).logical_and(counts[1 - i] == 0).any() for i in (0, 1))
    assert (sum(counts) == 0).any() and not tensors["kv_indices"].diff().gt(0).all()
    assert (tensors["kv_indices"] == NO_BLOCK).sum() == tensors["kv_indices"].numel() - counts[0].sum()


def test_rows_without_blocks_are_zero_and_full_blocks_need_no_predicate():
    problem = AttentionProblem(1, 1, 1, 64, 64, 16, "fp32", blocks="32x32:64", mask="causal_upper_left", lse=True)
    tensors = make_inputs(problem, 1, "cpu")
    tensors["kv_num_blocks"][...] = 0
    tensors["full_kv_num_blocks"][...] = torch.tensor([1, 0])
    tensors["full_kv_indices"][..., 0, 0] = 1  # hidden by the mask
    q, k, v = (tensors[name].double() for name in "qkv")
    out = exact_attention(problem, q, k, v, torch.float64, others=tensors)
    lse = exact_lse(problem, q, k, tensors)
    scores = q[0, 0, :32] @ k[0, 0, 32:].T / 4
    assert torch.allclose(out[0, 0, :32], torch.softmax(scores, -1) @ v[0, 0, 32:])
    assert (out[0, 0, 32:] == 0).all() and lse[0, 0, 32:].isneginf().all()
    assert torch.allclose(lse[0, 0, :32], scores.logsumexp(-1))


def test_a_drawn_list_says_how_many_blocks_a_row_visits():
    problem = parse_shape("B=1,H=2,S=4096,D=64,dtype=fp16,mask=full,blocks=128x128:1/7/16")
    assert blocks_of_rows(*problem.block_mask) == (8.0, 16)
