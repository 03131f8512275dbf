"""The least that a problem takes: pairs, operations and bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evoattn.model.problem import AttentionProblem


def visible_pairs(problem: AttentionProblem) -> int:
    """Query-key pairs that the mask lets through, summed over sequences and heads."""
    return problem.heads * sum(problem.masking.visible_pairs(*lengths) for lengths in problem.sequences)


def flops(problem: AttentionProblem) -> int:
    """Floating-point operations: 2·head_dim for a score and as many for its part of O, of V's head_dim, for every
    visible pair (flash-attention's count)."""
    return 2 * (problem.head_dim + problem.head_dim_v) * visible_pairs(problem)


def moved_bytes(problem: AttentionProblem) -> int:
    """Fewest bytes through device memory: Q, the keys and values that some query sees, and the bias read once, O and
    the log-sum-exp, if any, written once."""
    p = problem
    keys = sum(keys for rows, keys in p.sequences if rows)
    if p.window:
        keys = sum(len(p.masking.visible_keys(0, rows, rows, count)) for rows, count in p.sequences)
    elements = math.prod(p.shape("q")) + math.prod(p.shape("o")) + math.prod(p.term_shapes.get("bias", (0,)))
    elements += p.kv_heads * keys * (p.head_dim + (0 if p.shared_kv else p.head_dim_v))
    return p.element_bytes * elements + 4 * p.lse * math.prod(p.lse_shape)
