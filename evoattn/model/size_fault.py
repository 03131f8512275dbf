"""Sizes that a problem cannot have."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evoattn.model.problem import AttentionProblem

MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 8, 8192, 8
SMALLEST_HEAD_DIM = 4
"""The one head_dim under a whole step: for toy problems."""


def size_fault(problem: AttentionProblem) -> str:
    """One sentence if the sizes cannot be, alone or together, else empty."""
    for field in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k", "head_dim"):
        value = getattr(problem, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return f"{field} must be a whole number of at least 1, not {value!r}."
    if problem.heads % problem.kv_heads:
        return (
            f"{problem.heads} query heads do not divide over {problem.kv_heads} K/V heads; choose kv_heads that "
            "divides heads."
        )
    for field, dim in (("head_dim", problem.head_dim), ("value_dim", problem.head_dim_v)):
        if isinstance(dim, bool) or not isinstance(dim, int) or not _is_head_dim(dim):
            return (
                f"{field} must be {SMALLEST_HEAD_DIM} or a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to "
                f"{MAX_HEAD_DIM}, not {dim!r}."
            )
    return ""


def _is_head_dim(dim: int) -> bool:
    return dim == SMALLEST_HEAD_DIM or (dim % HEAD_DIM_STEP == 0 and MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM)
