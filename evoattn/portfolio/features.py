"""What of a problem decides which kernel is fast: a few logarithms, the same for building a portfolio and for choosing from it."""

from __future__ import annotations

import math

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem

TILE_ROWS = 128
"""Rows of the tiles that are counted: the middle of what the families use."""


def class_of(problem: AttentionProblem) -> str:
    """The class whose kernels serve the problem: 16 or 32 bits, head_dim and mask, e.g. `16 d64 causal`.

    fp16 and bf16 share their choices: the same instructions at the same rates. So do both causal masks, which differ by an offset.
    """
    bits = "32" if problem.dtype == "fp32" else "16"
    return f"{bits} d{problem.head_dim} {'causal' if problem.causal else 'full'}"


def features(problem: AttentionProblem, gpu: GpuSpec) -> dict[str, float]:
    """Base-2 logarithms, and the part of the last wave of tiles that is filled (0 to 1)."""
    heads = problem.batch * problem.heads
    tiles = math.ceil(problem.seqlen_q / TILE_ROWS) * heads
    waves = tiles / gpu.sm_count
    return {
        "queries": math.log2(problem.seqlen_q),
        "keys": math.log2(problem.seqlen_k),
        "rows per SM": math.log2(problem.seqlen_q * heads / gpu.sm_count),
        "tiles per SM": math.log2(waves),
        "last wave": waves - math.floor(waves) if waves > 1 else 1.0,
        "K/V heads per SM": math.log2(problem.batch * problem.kv_heads / gpu.sm_count),
        "group": math.log2(problem.group_size),
    }
