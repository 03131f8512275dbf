"""What the kernels of three_kernel take: threads, shared memory, registers, work."""

from __future__ import annotations

import math

from evoattn.families.residency import WARP
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ELEMENT_BYTES, ROW_BYTES
from evoattn.families.three_kernel.genes import ThreeKernelGenes
from evoattn.model.problem import AttentionProblem

SCORES_REGISTERS = 40
"""Addresses and fragments of Q and K beside the accumulators of a thread; as the next two, no spill in random configs
from here on."""
VALUES_REGISTERS = 48
FACTOR_REGISTERS = 72
"""More of them where P V rescales O for each tile."""
SOFTMAX_REGISTERS = 24
WGMMA_REGISTERS = 40


def uses_wgmma(genes: ThreeKernelGenes) -> bool:
    """Whether both products are by wgmma, else by mma.sync."""
    return genes.PRODUCT == "wgmma"


def has_tile_softmax(genes: ThreeKernelGenes) -> bool:
    """Whether Q Kᵀ writes probabilities relative to the maxima of each tile."""
    return genes.SOFTMAX in ("tiles", "tiles_late")


def smem_row_bytes(problem: AttentionProblem) -> int:
    """Bytes of a row of Q, K, V or O in shared memory: head_dim up to whole k16 steps."""
    return math.ceil(problem.head_dim / 16) * 16 * ELEMENT_BYTES


def _chunked_row_bytes(problem: AttentionProblem) -> int:
    """Bytes of a row of Q, K, V or O in whole chunks."""
    return math.ceil(problem.head_dim / CHUNK_COLUMNS) * ROW_BYTES


def threads_a_block(genes: ThreeKernelGenes) -> tuple[int, int, int]:
    """Threads per block of Q Kᵀ, softmax, P V."""
    return (WARP * genes.WARPS_M * genes.WARPS_N, genes.THREADS_PER_ROW * genes.ROWS_PER_BLOCK, WARP * genes.PV_WARPS)


def scores_smem_bytes(problem: AttentionProblem, genes: ThreeKernelGenes) -> int:
    """Dynamic shared memory of a block of Q Kᵀ: whole rows of Q and K; with wgmma S (that of a
    block's only tile in their place), two stages of K for several tiles, and barriers."""
    if uses_wgmma(genes):
        stages = min(2, genes.TILES_A_BLOCK)
        tiles = (genes.BLOCK_M + stages * genes.BLOCK_N) * _chunked_row_bytes(problem)
        s = genes.BLOCK_M * genes.BLOCK_N * ELEMENT_BYTES
        return (max(tiles, s) if stages == 1 else tiles + s) + 8 * (1 + stages)
    return (genes.BLOCK_M + genes.BLOCK_N) * smem_row_bytes(problem)


def values_smem_bytes(problem: AttentionProblem, genes: ThreeKernelGenes) -> int:
    """Dynamic shared memory of a block of P V: the ring of P and V, in whose place later O; with wgmma a barrier a
    stage."""
    block_m, block_k = genes.PV_BLOCK_M, genes.PV_BLOCK_K
    if uses_wgmma(genes):
        row_bytes = _chunked_row_bytes(problem)
        ring = genes.PV_STAGES * block_k * (block_m * ELEMENT_BYTES + row_bytes)
        return max(ring, block_m * row_bytes) + 8 * genes.PV_STAGES
    ring = genes.PV_STAGES * block_k * (block_m * ELEMENT_BYTES + smem_row_bytes(problem))
    return max(ring, block_m * smem_row_bytes(problem))


def registers_needed(problem: AttentionProblem, genes: ThreeKernelGenes) -> tuple[int, int, int]:
    """Estimates of the registers per thread of Q Kᵀ, softmax and P V below which ptxas spills: accumulators or kept
    scores, and the rest."""
    kept = genes.KEPT_VECTORS * genes.VECTOR_WIDTH
    if uses_wgmma(genes):
        return (genes.BLOCK_N // 2 + WGMMA_REGISTERS, SOFTMAX_REGISTERS + kept, problem.head_dim // 2 + WGMMA_REGISTERS)
    row_tiles, key_tiles = genes.BLOCK_M // (16 * genes.WARPS_M), genes.BLOCK_N // (8 * genes.WARPS_N)
    value_tiles = genes.PV_BLOCK_M // (16 * genes.PV_WARPS)
    factors = FACTOR_REGISTERS if has_tile_softmax(genes) else 0
    return (
        row_tiles * (4 * key_tiles + 4) + SCORES_REGISTERS,
        SOFTMAX_REGISTERS + kept,
        value_tiles * (problem.head_dim // 2 + 8) + VALUES_REGISTERS + factors,
    )


def exponents_late(genes: ThreeKernelGenes) -> bool:
    return genes.SOFTMAX == "statistics"


def merges_late(genes: ThreeKernelGenes) -> bool:
    """Whether P V merges the maxima of tiles, in two launches."""
    return genes.SOFTMAX == "tiles_late"


def may_overlap(genes: ThreeKernelGenes) -> bool:
    return genes.DEPENDENT_LAUNCH != "none"
