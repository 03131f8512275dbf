"""A mask's own knowledge, held against a matrix of booleans; and a row that no family knows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evoattn.correctness import reference
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
