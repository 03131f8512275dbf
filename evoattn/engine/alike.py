"""How alike two problems are to a kernel, by numbers of tiles, rows and keys: a search of several problems times a
kernel on those first that are most like its own."""

import math

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem

TILE_ROWS = 128
"""Rows of the tiles that are counted: the middle of what the families use."""
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


def row_tiles(problem: AttentionProblem) -> int:
    """Tiles of rows of one head in all batches. A packed sequence fills half of its last one, in the mean."""
    if problem.varlen:
        return math.ceil(problem.head_rows[0] / TILE_ROWS + problem.batch / 2)
    return math.ceil(problem.seqlen_q / TILE_ROWS) * problem.batch


def _most_keys(problem: AttentionProblem) -> int:
    """The most keys that a query can see: under a window those that it shows beside the diagonal."""
    past, ahead = problem.masking.past, problem.masking.ahead
    if past is None or ahead is None:
        return problem.seqlen_k
    before, behind = problem.causal_offset + problem.seqlen_q - 1, problem.seqlen_k - 1 - problem.causal_offset
    return max(1, min(problem.seqlen_k, min(past, before) + 1 + min(ahead, max(0, behind))))


def features(problem: AttentionProblem, gpu: GpuSpec) -> dict[str, float]:
    """Base-2 logarithms, and the part of the last wave of tiles that is filled (0 to 1). Keys are those that a query
    can see: no more than a window shows. Packed sequences have as many queries as they have in the mean."""
    waves = row_tiles(problem) * problem.heads / gpu.sm_count
    queries = problem.batch * problem.seqlen_q
    if problem.varlen:
        queries = max(1, problem.head_rows[0])
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
