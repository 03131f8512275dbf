"""What the kernels of fp8_wgmma take of an SM: shared memory and registers."""

from __future__ import annotations

import math

from evoattn.families.flash_wgmma.registers import (
    FIXED_REGISTERS,
    PERSISTENT_REGISTERS,
    REGISTERS_UNDER_WGMMA,
    WARPGROUP_ROWS,
    moved_registers,
    warpgroups,
)
from evoattn.families.flash_wgmma.resources import (
    O_CHUNK_PLACES,
    SEQUENCE_TILE_WORDS,
    TILE_WORDS,
    chunks_of,
    is_persistent,
)
from evoattn.families.fp8_wgmma.genes import Fp8WgmmaGenes
from evoattn.families.tensor_tiles import ROW_BYTES
from evoattn.model.problem import AttentionProblem

ALIGNMENT = 1024
"""Bytes: of a tile with the 128-byte swizzle."""
STEP_BYTES = 32
"""Of a row, in one wgmma."""


def row_chunks(dim: int) -> int:
    """128-byte chunks of a row of `dim` numbers of 8 bits."""
    return math.ceil(dim / ROW_BYTES)


def smem_bytes(problem: AttentionProblem, genes: Fp8WgmmaGenes) -> int:
    """Dynamic shared memory of a block: Q; the rings of K, of V as it comes and of V turned round; O or some chunks of
    it if the next Q loads before O has left; or O in fp32 if it is added up there; barriers; what the producer says of
    two tiles, and of the last V."""
    chunks, value_chunks, o_columns = (
        row_chunks(problem.head_dim),
        row_chunks(problem.head_dim_v),
        chunks_of(problem.head_dim_v),
    )
    sums = max(problem.head_dim_v * 4, o_columns * ROW_BYTES)  # O takes their place
    sums = genes.BLOCK_M * sums if genes.SUM_PLACE == "shared" else 0
    own = is_persistent(genes.flash) and not sums
    o_chunks = (O_CHUNK_PLACES if genes.STORE == "chunks" else o_columns) if own else 0
    q_bytes = genes.BLOCK_M * ROW_BYTES * (chunks if o_chunks or sums else max(chunks, o_columns))
    turned = math.ceil(problem.head_dim_v * genes.BLOCK_N / ALIGNMENT) * ALIGNMENT
    rings = genes.STAGES * (genes.BLOCK_N * ROW_BYTES * (chunks + value_chunks) + turned)
    tile_words = SEQUENCE_TILE_WORDS if problem.varlen or problem.seqused else TILE_WORDS
    barriers = 8 * (2 * warpgroups(genes.flash) + 6 * genes.STAGES + 1)
    words = 4 * genes.STAGES + 2 * tile_words * 4
    return q_bytes + rings + o_chunks * genes.BLOCK_M * ROW_BYTES + sums + barriers + words


def registers_needed(problem: AttentionProblem, genes: Fp8WgmmaGenes) -> int:
    """Estimate of the registers per consumer thread below which ptxas spills or serializes wgmma: S, P, O and what it
    was before the last flush, Q if it stays, and what flash_wgmma keeps beside them."""
    sums = 2 if genes.SUM_PLACE == "registers" else 1
    operands = genes.BLOCK_N // 2 + genes.BLOCK_N // 8 + problem.head_dim_v // 2 * sums
    if genes.Q_IN_REGISTERS:
        operands += 4 * math.ceil(problem.head_dim / STEP_BYTES)
    others = FIXED_REGISTERS + (PERSISTENT_REGISTERS if is_persistent(genes.flash) else 0)
    return operands + others


def begins_ahead(problem: AttentionProblem, genes: Fp8WgmmaGenes) -> bool:
    """As flash_wgmma's: whether a tile of rows begins beside the last product of the one before."""
    skipped = math.ceil((genes.BLOCK_M - WARPGROUP_ROWS) / genes.BLOCK_N) if genes.CAUSAL_SKIP else 0
    if not (is_persistent(genes.flash) and genes.OVERLAP and genes.Q_IN_REGISTERS) or skipped >= genes.STAGES:
        return False
    return registers_needed(problem, genes) + genes.BLOCK_N // 8 <= moved_registers(genes.flash)[1]


def widest_wgmma(problem: AttentionProblem, genes: Fp8WgmmaGenes) -> int:
    """Registers per thread that the widest wgmma needs at launch."""
    return max(genes.BLOCK_N // 2 + 4 * genes.Q_IN_REGISTERS, problem.head_dim_v // 2 + 4) + REGISTERS_UNDER_WGMMA
