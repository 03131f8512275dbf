"""The inputs of a problem beside q, k and v."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evoattn.model.problem import AttentionProblem

BIAS_ROW_STEP = 8
"""Elements that the rows of a bias are multiples of."""


def term_shapes(problem: AttentionProblem) -> dict[str, tuple[int, ...]]:
    """Shapes of the contiguous inputs beside q, k and v.

    `sinks` is in the problem's dtype, `slopes` float32; `bias`, in the problem's dtype, has rows of `seqlen_k` rounded
    up to 8 elements, so that they begin at multiples of 16 bytes, and what lies past the last key means nothing.
    `seqused` holds the keys of each batch that are in use, `table` the pages of each batch's sequence in their order,
    both int32; entries of pages behind the last key in use mean nothing. `cu_seqlens_q` and `cu_seqlens_k`, int32, say
    where packed sequences begin, and where the last one ends.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    if problem.sink:
        shapes["sinks"] = (problem.heads,)
    if problem.alibi:
        shapes["slopes"] = (problem.heads,)
    if problem.bias:
        rows = problem.batch if "b" in problem.bias else 1, problem.heads if "h" in problem.bias else 1
        columns = -(-problem.seqlen_k // BIAS_ROW_STEP) * BIAS_ROW_STEP
        shapes["bias"] = (*rows, problem.seqlen_q, columns)
    if problem.seqused:
        shapes["seqused"] = (problem.batch,)
    if problem.page:
        shapes["table"] = (problem.batch, problem.table_pages)
    if problem.varlen:
        shapes |= {"cu_seqlens_q": (problem.batch + 1,), "cu_seqlens_k": (problem.batch + 1,)}
    return shapes


def bias_strides(problem: AttentionProblem) -> tuple[int, int, int, int]:
    """Strides of the bias `[batch, heads, seqlen_q, seqlen_k]` in elements: 0 where it is the same for all."""
    batch, heads, rows, row = term_shapes(problem)["bias"]
    return heads * rows * row * (batch > 1), rows * row * (heads > 1), row, 1
