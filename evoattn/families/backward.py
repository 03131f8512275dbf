"""What the families of the backward pass have in common."""

import math
from collections import Counter
from functools import lru_cache
from typing import ClassVar

from evoattn.families.base import Family
from evoattn.model.backward import parse_grads
from evoattn.model.block_list import blocks_of_rows, parse_blocks
from evoattn.model.launch import NULL, Buffer, KernelArg, Scalar
from evoattn.model.mask import Mask
from evoattn.model.problem import AttentionProblem


class Backward(Family):
    operations: ClassVar[tuple[str, ...]] = ("backward",)
    writes_lse: ClassVar[bool] = True
    scored: ClassVar[tuple[str, ...]] = ("window", "softcap", "sink", "alibi", "bias", "score", "value_dim")
    """The variants that all of them serve."""


def strides_of(problem: AttentionProblem, *tensors: str) -> tuple[KernelArg, ...]:
    """Of batches, heads and rows, in elements."""
    return tuple(Scalar("int64", stride) for t in tensors for stride in problem.strides(t)[:3])


def bias_gradient(problem: AttentionProblem) -> KernelArg:
    """The buffer of the bias's gradient, in float32, if it is wanted."""
    return Buffer("dbias") if "bias" in parse_grads(problem.grads) else NULL


def bias_gradient_strides(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """Of batches, heads and rows; it is contiguous, however the bias lies."""
    batch, heads, rows, row = problem.term_shapes["bias"] if "bias" in parse_grads(problem.grads) else (1, 1, 0, 0)
    strides = heads * rows * row * (batch > 1), rows * row * (heads > 1), row
    return tuple(Scalar("int64", stride) for stride in strides)


def shares_bias(problem: AttentionProblem) -> bool:
    """Whether the gradient of the bias is wanted and batches or heads add to the same numbers of it."""
    return "bias" in parse_grads(problem.grads) and problem.bias != "bhs"


def key_blocks(problem: AttentionProblem, keys: int) -> int:
    """Tiles of `keys` keys of one head of one of `batches`; of packed sequences slots, as `row_blocks` has them."""
    if problem.varlen:
        return problem.shape("k")[2] // keys + problem.batch
    return math.ceil(problem.seqlen_k / keys)


@lru_cache(maxsize=1024)  # candidates of one problem have few tiles
def tile_steps(mask: Mask, queries: int, count: int, rows: int, keys: int) -> tuple[int, ...]:
    """Tiles of `rows` queries that see each tile of `keys` of a sequence's `count` keys."""
    found, band = [], mask.band(queries, count)
    for first in range(0, count, keys):
        seen = band.queries(first, min(first + keys, count)) if queries else range(0)
        found.append(math.ceil(seen.stop / rows) - seen.start // rows if seen else 0)
    return tuple(found)


def key_steps(problem: AttentionProblem, rows: int, keys: int) -> tuple[float, float, int]:
    """(mean, most, count): tiles of `rows` queries of one head that blocks of `keys` keys go through, and how many
    blocks a K/V head of one of `batches` has."""
    if problem.blocks:
        mask = parse_blocks(problem.blocks)
        listed, count = mask.blocks(problem.band)
        tiles = listed / count * mask.rows / rows  # of a block of keys, as far as lists of rows say
        mean, most = (tiles * number for number in blocks_of_rows(*problem.block_mask))
        return mean, max(most, 1.0), math.ceil(problem.seqlen_k / keys)
    total, most, blocks = 0.0, 0, 0
    for (queries, count), times in Counter(problem.sequences).items():
        for tiles in tile_steps(problem.masking, queries, count, rows, keys):
            total, most, blocks = total + times * tiles, max(most, tiles), blocks + times
    blocks = max(1, blocks)
    return total / blocks, float(most), max(1, round(blocks / (1 if problem.varlen else problem.batch)))
