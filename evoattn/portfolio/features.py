"""What tells problems apart: the class that shares kernels, and how alike two problems of a class are."""

from __future__ import annotations

import math

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.variant import parse_window

TILE_ROWS = 128
"""Rows of the tiles that are counted: the middle of what the families use."""
FEW_ROWS = 128
"""Query rows that share a K/V head, up to which a problem is one of few queries: decoding and small chunks, bound by
reading K and V."""
SCALES = {
    "queries": 0.5,
    "keys": 0.7,
    "rows per SM": 0.6,
    "tiles per SM": 1.0,
    "last wave": 1.0,
    "K/V heads per SM": 0.5,
    "group": 0.5,
}
"""Weight of each feature in `distance`."""


def class_of(problem: AttentionProblem) -> str:
    """The class whose kernels serve the problem: bits, head_dim, mask, few or many queries, e.g. `16 d64 causal many`,
    `16 d64 causal+window+sink many`, `16 d192 causal+dv128 many`.

    fp16 and bf16 share their choices: the same instructions at the same rates. So do both causal masks, which differ
    by an offset.
    """
    bits = "32" if problem.dtype == "fp32" else "16"
    rows = "few" if problem.group_size * problem.seqlen_q <= FEW_ROWS else "many"
    words = (f"dv{problem.value_dim}" if name == "value_dim" else name for name in problem.variants)
    mask = "+".join(("causal" if problem.causal else "full", *words))
    return f"{bits} d{problem.head_dim} {mask} {rows}"


def features(problem: AttentionProblem, gpu: GpuSpec) -> dict[str, float]:
    """Base-2 logarithms, and the part of the last wave of tiles that is filled (0 to 1). Keys are those that a query
    can see: no more than a window shows."""
    heads = problem.batch * problem.heads
    keys = min(problem.seqlen_k, sum(parse_window(problem.window)) + 1) if problem.window else problem.seqlen_k
    waves = math.ceil(problem.seqlen_q / TILE_ROWS) * heads / gpu.sm_count
    return {
        "queries": math.log2(problem.seqlen_q),
        "keys": math.log2(keys),
        "rows per SM": math.log2(problem.seqlen_q * heads / gpu.sm_count),
        "tiles per SM": math.log2(waves),
        "last wave": waves - math.floor(waves) if waves > 1 else 1.0,
        "K/V heads per SM": math.log2(problem.batch * problem.kv_heads / gpu.sm_count),
        "group": math.log2(problem.group_size),
    }


def distance(a: dict[str, float], b: dict[str, float]) -> float:
    """Euclidean distance of two problems' features, each weighted by SCALES."""
    return math.sqrt(sum((scale * (a[name] - b[name])) ** 2 for name, scale in SCALES.items()))
