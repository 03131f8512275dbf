"""What the kernels of large_head_mma take: threads, shared memory, registers, work."""

from __future__ import annotations

import math

from evoattn.families.large_head_mma.genes import LargeHeadMmaGenes
from evoattn.model.problem import AttentionProblem

ELEMENT_BYTES = 2
"""Of fp16 and bf16, the dtypes of this family."""
CHUNK = 8
"""Elements of 16 bytes, which one lane copies at a time."""
FIXED_REGISTERS = 40
"""Addresses, counters, bounds, fragments of K and V under way."""
ROW_TILE_REGISTERS = 16
"""Shifts, sums and the fragment of Q or P of one tile of 16 rows."""
WIDE_CHUNK, WIDE_CHUNK_REGISTERS = 128, 12
"""What ptxas loads ahead for one tile of 16 rows from a DIM_CHUNK of this width on."""


def block_warps(genes: LargeHeadMmaGenes) -> int:
    return genes.ROW_WARPS * genes.COLUMN_WARPS


def slice_elements(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """Columns of O that one block has."""
    return problem.head_dim // genes.DV_SPLIT


def in_cluster(genes: LargeHeadMmaGenes) -> bool:
    return genes.SCORES == "cluster"


def dim_blocks(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """Blocks of 16 columns of O that one warp has."""
    return math.ceil(slice_elements(problem, genes) / (16 * genes.COLUMN_WARPS))


def _row_bytes(genes: LargeHeadMmaGenes, elements: int) -> int:
    """Bytes of a row of `elements` in shared memory, with a padding chunk if it is not swizzled."""
    return ELEMENT_BYTES * (elements + (CHUNK if genes.SMEM_LAYOUT == "padded" else 0))


def dim_steps(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """Chunks that a tile of K comes in: of all columns, or of the block's slice."""
    return math.ceil((slice_elements(problem, genes) if in_cluster(genes) else problem.head_dim) / genes.DIM_CHUNK)


def stage_bytes(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """One place of the ring: a chunk of K, with one of Q if that is streamed, or a chunk of V."""
    rows = genes.BLOCK_N + (genes.BLOCK_M if genes.Q_PLACE == "streamed" else 0)
    v_columns = 16 * genes.COLUMN_WARPS * dim_blocks(problem, genes)
    return max(rows * _row_bytes(genes, genes.DIM_CHUNK), genes.KEY_CHUNK * _row_bytes(genes, v_columns))


def q_bytes(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """Q of a block, in chunks as wide as those of K."""
    if genes.Q_PLACE == "streamed":
        return 0
    return dim_steps(problem, genes) * genes.BLOCK_M * _row_bytes(genes, genes.DIM_CHUNK)


def smem_bytes(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """Dynamic shared memory of a block: the ring, Q, P, two tiles of partial scores in a cluster, and a float for each
    row and column warp if there are several of these."""
    block_m, column_warps = genes.BLOCK_M, genes.COLUMN_WARPS
    p = genes.BLOCK_N // genes.KEY_CHUNK * block_m * _row_bytes(genes, genes.KEY_CHUNK)
    partials = 2 * 4 * block_m * genes.BLOCK_N if in_cluster(genes) else 0
    rows = 4 * block_m * column_warps if column_warps > 1 else 0
    return genes.STAGES * stage_bytes(problem, genes) + q_bytes(problem, genes) + p + partials + rows


def registers_needed(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """Estimate of the registers per thread below which ptxas spills: the accumulators of O and S beside what a tile of
    16 rows needs.

    Fitted to NVRTC 13.0 on sm_89 and sm_90a.
    """
    row_tiles = genes.BLOCK_M // (16 * genes.ROW_WARPS)
    accumulators = 8 * dim_blocks(problem, genes) + genes.BLOCK_N // genes.COLUMN_WARPS // 2
    ahead = WIDE_CHUNK_REGISTERS if genes.DIM_CHUNK >= WIDE_CHUNK else 0
    return row_tiles * (accumulators + ROW_TILE_REGISTERS + ahead) + FIXED_REGISTERS
