"""What the kernels of flash_mma take: threads, shared memory, registers, work."""

from __future__ import annotations

import math

from evoattn.families.flash_mma.genes import FlashMmaGenes
from evoattn.families.residency import WARP
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import PER_TOKEN

CHUNK_BYTES = 16
FIXED_REGISTERS = 44
"""Addresses, counters, bounds, fragments of K and V under way."""
ROW_TILE_REGISTERS = 8
"""Shifts, sums and the fragment of P of one tile of 16 rows."""
LAZY_REGISTERS = {"mma": 4, "add": 12}
"""What the way back of a lazy shift keeps alive for one tile of 16 rows, by ROW_SUM."""


def smem_row_bytes(head_dim: int, element_bytes: int, genes: FlashMmaGenes) -> int:
    """Bytes of a row of that head_dim in shared memory: up to whole k16 steps, and a padding chunk without swizzle."""
    padding = CHUNK_BYTES if genes.SMEM_LAYOUT == "padded" else 0
    return math.ceil(head_dim / 16) * 16 * element_bytes + padding


def block_warps(genes: FlashMmaGenes) -> int:
    return genes.WARPS * genes.KEY_WARPS


def ring_stages(genes: FlashMmaGenes) -> tuple[int, int]:
    """Tiles of K and of V in shared memory."""
    return genes.STAGES, genes.STAGES - (genes.SCHEDULE == "split_short_v")


def smem_bytes(problem: AttentionProblem, genes: FlashMmaGenes) -> int:
    """Dynamic shared memory of a block: Q and the rings of K and V; in their place later O and the partial results of
    the key warps."""
    row_bytes = smem_row_bytes(problem.head_dim, problem.element_bytes, genes)
    key_bytes, value_bytes = (
        smem_row_bytes(problem.shape(t)[3], problem.element_of(t).bytes, genes) for t in ("k", "v")
    )
    q_bytes = 0 if genes.Q_PLACE == "direct" else genes.BLOCK_M * row_bytes
    k_stages, v_stages = ring_stages(genes)
    loop = q_bytes + genes.BLOCK_N * (k_stages * key_bytes + v_stages * value_bytes)
    o_row_bytes = smem_row_bytes(problem.head_dim_v, problem.answer.bytes, genes)
    o_bytes = genes.BLOCK_M * o_row_bytes if genes.O_STORE == "shared" else 0
    # O, two shifts and two sums of each lane in fp32: head_dim of V / 2 + 4 floats per lane for every 16 rows.
    merge = (genes.KEY_WARPS - 1) * genes.BLOCK_M // 16 * WARP * (problem.head_dim_v // 2 + 4) * 4
    return max(loop, max(q_bytes, o_bytes) + merge)


def registers_needed(problem: AttentionProblem, genes: FlashMmaGenes) -> int:
    """Estimate of the registers per thread below which ptxas spills.

    A tile of 16 rows has accumulators of O, half of V's head_dim, the warp's keys / 2 of S (of two tiles if overlapped)
    and head_dim / 4 registers of Q if Q stays there (docs/sources.md). The rest was fitted to NVRTC 13.0 on sm_89 and
    sm_90a: of 340 random configs let through 4 spilled.
    """
    row_tiles = genes.BLOCK_M // (16 * genes.WARPS)
    scales = genes.BLOCK_N // genes.KEY_WARPS // 2 if problem.scales == PER_TOKEN else 0
    scores = genes.BLOCK_N // genes.KEY_WARPS // 2 * (2 if genes.SCHEDULE == "overlapped" else 1)
    q = 0 if genes.Q_PLACE == "shared" else 4 * math.ceil(problem.head_dim / 16)
    lazy = LAZY_REGISTERS[genes.ROW_SUM] if genes.RESCALE == "lazy" else 0
    return row_tiles * (problem.head_dim_v // 2 + scores + q + lazy + ROW_TILE_REGISTERS) + scales + FIXED_REGISTERS
