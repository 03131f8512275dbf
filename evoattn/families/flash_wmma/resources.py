"""What the kernels of flash_wmma take: threads, shared memory, registers, work."""

from __future__ import annotations

import math

from evoattn.families.flash_wmma.genes import FlashWmmaGenes
from evoattn.families.residency import WARP
from evoattn.model.problem import AttentionProblem

TILE = 16
"""Side of a wmma matrix."""
FRAGMENT_REGISTERS = 8
"""Of an operand or an accumulator of m16n16k16, a lane."""
FIXED_REGISTERS = 56
"""Addresses, bounds, the map of rows, fragments of K and V under way: from here on few spills in random configs (ptxas
13.0)."""
V_REGISTERS = 3
"""Of each tile of O that a lane keeps: its V on the way."""
PASS_REGISTERS = 6
"""Of each row of a lane in the softmax: maximum, sum, address, scores under way."""


def block_warps(genes: FlashWmmaGenes) -> int:
    return genes.ROW_WARPS * genes.COLUMN_WARPS


def tiles_of_head(problem: AttentionProblem) -> int:
    return math.ceil(problem.head_dim / TILE)


def tiles_of_rows(genes: FlashWmmaGenes) -> int:
    """Tiles of 16 rows per warp."""
    return genes.BLOCK_M // (TILE * genes.ROW_WARPS)


def smem_parts(problem: AttentionProblem, genes: FlashWmmaGenes) -> dict[str, int]:
    """Bytes of dynamic shared memory by what they hold: a float per row; Q; the rings of K and V; S, in whose place P;
    O if it lives there.

    With O in fragments it takes the place of Q, K, V and S at the end, and counts only what it has over them.
    """
    block_m, block_n, padding = genes.BLOCK_M, genes.BLOCK_N, genes.PADDING_BYTES
    row_bytes = tiles_of_head(problem) * TILE * 2 + padding
    o_bytes = block_m * (tiles_of_head(problem) * TILE * 4 + padding)
    parts = {
        "row factors": 4 * block_m,
        "Q": block_m * row_bytes,
        "K and V": 2 * genes.STAGES * block_n * row_bytes,
        "S": block_m * (4 * block_n + padding),
    }
    if genes.O_PLACE == "fragments":
        o_bytes = max(0, o_bytes - parts["Q"] - parts["K and V"] - parts["S"])
    return parts | {"O": o_bytes}


def smem_bytes(problem: AttentionProblem, genes: FlashWmmaGenes) -> int:
    """Dynamic shared memory of a block."""
    return sum(smem_parts(problem, genes).values())


def registers_needed(problem: AttentionProblem, genes: FlashWmmaGenes) -> int:
    """Estimate of the registers per thread below which ptxas spills: O and Q if they stay in fragments, S, the scores
    of a row, the rest."""
    row_tiles, dim_tiles = tiles_of_rows(genes), tiles_of_head(problem)
    o_tiles = math.ceil(dim_tiles / genes.COLUMN_WARPS) if genes.O_PLACE == "fragments" else 1
    q_tiles = dim_tiles if genes.Q_PLACE == "fragments" else 1
    passes = math.ceil(TILE * row_tiles * genes.THREADS_PER_ROW / (WARP * genes.COLUMN_WARPS))
    product = row_tiles * FRAGMENT_REGISTERS
    softmax = genes.BLOCK_N // genes.THREADS_PER_ROW
    kept = row_tiles * (o_tiles + q_tiles) * FRAGMENT_REGISTERS + V_REGISTERS * o_tiles
    return kept + max(product, softmax) + PASS_REGISTERS * passes + FIXED_REGISTERS
