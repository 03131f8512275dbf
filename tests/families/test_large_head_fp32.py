"""large_head at the usual head_dims, which it serves in fp32 alone: right on the interpreter by three tf32 products."""

from __future__ import annotations

import pytest

from tests.families.test_large_head import TENSOR, config, outcome, problem

ONE_BLOCK = TENSOR | {"BLOCK_M": 64, "SCORE_ROWS": 32, "SCORE_KEYS": 16, "VALUE_THREADS": 32, "STAGES": 2}


@pytest.mark.parametrize(
    ("head_dim", "mask", "kind"),
    [
        (32, "full", "large_logits"),
        pytest.param(64, "causal_lower_right", "rising_maximum", marks=pytest.mark.slow),
        pytest.param(96, "causal_upper_left", "plain", marks=pytest.mark.slow),
        pytest.param(128, "full", "late_huge_key", marks=pytest.mark.slow),
    ],
)
def test_fp32_at_the_usual_head_dims_is_right_by_tf32(head_dim, mask, kind):
    assert outcome(problem(61, 77, head_dim, mask=mask, layout="bshd"), config(**ONE_BLOCK), kind).passed
