"""What tells problems apart: the class that shares kernels, and how alike two problems of a class are."""

from __future__ import annotations

import math

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.variant import parse_window

TILE_ROWS = 128
"""Rows of the tiles that are counted: the middle of what the families use."""
DECODE_ROWS, FEW_ROWS = 16, 128
"""Query rows that share a K/V head: up to those of the smallest tile of split_kv's tensor cores, and up to where a
problem is one of few queries, bound by reading K and V."""
NARROW_HEADS, WAVE_TILES, BRIEF_KEYS = 66, 132, 512
"""Half the SMs of an H100 or H200, all of them, and a few tiles of keys."""
GROUPED = "-grouped"
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
    """The class whose kernels serve the problem: bits, head_dim, mask, how many rows, tiles, heads and keys there are,
    and whether query heads share K/V heads, e.g. `16 d64 causal many`, `16 d64 causal+window+sink few-narrow-grouped`,
    `16 d192 causal+dv128 short-brief`.

    fp16 and bf16 share their choices: the same instructions at the same rates. So do both causal masks, which differ
    by an offset.
    """
    bits = "32" if problem.dtype == "fp32" else "16"
    words = (f"dv{problem.value_dim}" if name == "value_dim" else name for name in problem.variants)
    mask = "+".join(("causal" if problem.causal else "full", *words))
    return f"{bits} d{problem.head_dim} {mask} {_size_word(problem)}"


def _size_word(problem: AttentionProblem) -> str:
    """`decode` or `few` rows of queries that share a K/V head, `-narrow` where there are few K/V heads, so that the
    keys of each are shared out among SMs; else so few tiles that all run at once, `short`, or `many`, `-brief` where
    there are few keys. Then `-grouped` where query heads share K/V heads, so that they can be rows of one tile."""
    rows = problem.group_size * problem.seqlen_q
    grouped = GROUPED if problem.group_size > 1 else ""
    if rows <= FEW_ROWS:
        narrow = problem.batch * problem.kv_heads <= NARROW_HEADS
        return ("decode" if rows <= DECODE_ROWS else "few") + ("-narrow" if narrow else "") + grouped
    brief = "-brief" if problem.seqlen_k <= BRIEF_KEYS else ""
    tiles = row_tiles(problem) * problem.heads
    return ("short" if tiles <= WAVE_TILES else "many") + brief + grouped


def row_tiles(problem: AttentionProblem) -> int:
    """Tiles of rows of one head in all batches. A packed sequence fills half of its last one, in the mean."""
    if problem.varlen:
        return math.ceil(problem.shape("q")[2] / TILE_ROWS + problem.batch / 2)
    return math.ceil(problem.seqlen_q / TILE_ROWS) * problem.batch


def _most_keys(problem: AttentionProblem) -> int:
    """The most keys that a query can see: under a window those that it shows beside the diagonal."""
    if not problem.window:
        return problem.seqlen_k
    past, ahead = parse_window(problem.window)
    before, behind = problem.causal_offset + problem.seqlen_q - 1, problem.seqlen_k - 1 - problem.causal_offset
    return max(1, min(problem.seqlen_k, min(past, before) + 1 + min(ahead, max(0, behind))))


def features(problem: AttentionProblem, gpu: GpuSpec) -> dict[str, float]:
    """Base-2 logarithms, and the part of the last wave of tiles that is filled (0 to 1). Keys are those that a query
    can see: no more than a window shows. Packed sequences have as many queries as they have in the mean."""
    waves = row_tiles(problem) * problem.heads / gpu.sm_count
    queries = problem.batch * problem.seqlen_q
    if problem.varlen:
        queries = max(1, problem.shape("q")[2])
    return {
        "queries": math.log2(queries / problem.batch),
        "keys": math.log2(_most_keys(problem)),
        "rows per SM": math.log2(queries * problem.heads / gpu.sm_count),
        "tiles per SM": math.log2(waves),
        "last wave": waves - math.floor(waves) if waves > 1 else 1.0,
        "K/V heads per SM": math.log2(problem.batch * problem.kv_heads / gpu.sm_count),
        "group": math.log2(problem.group_size),
    }


def distance(a: dict[str, float], b: dict[str, float]) -> float:
    """Euclidean distance of two problems' features, each weighted by SCALES."""
    return math.sqrt(sum((scale * (a[name] - b[name])) ** 2 for name, scale in SCALES.items()))
