"""What the kernels of latent_wgmma take: threads, shared memory, registers."""

from __future__ import annotations

import math

from evoattn.families.latent_wgmma.genes import LatentWgmmaGenes
from evoattn.families.merge_work import MERGE_THREADS
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ROW_BYTES
from evoattn.model.problem import AttentionProblem

CONSUMER_WARPGROUPS = 2
"""The first multiplies Q Kᵀ and half of P V, the second the other half."""
THREADS = 128 * (CONSUMER_WARPGROUPS + 1)
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240
"""Per thread after setmaxnreg, of 168 at launch: 2·240 + 24 = 3·168."""
FIXED_REGISTERS = 32
"""Addresses, counters, row sums and shifts of the first warpgroup beside the operands of wgmma."""


def head_blocks(problem: AttentionProblem, genes: LatentWgmmaGenes) -> int:
    """Tiles of query heads that share a K/V head, of each query."""
    return math.ceil(problem.group_size / genes.BLOCK_M)


def row_blocks(problem: AttentionProblem, genes: LatentWgmmaGenes) -> int:
    """Tiles of rows of a K/V head."""
    return problem.seqlen_q * head_blocks(problem, genes)


def split_of(problem: AttentionProblem, genes: LatentWgmmaGenes) -> tuple[int, int]:
    """(splits, tiles of keys per split): SPLITS or fewer, none of them empty."""
    tiles = math.ceil(problem.seqlen_k / genes.BLOCK_N)
    split_tiles = math.ceil(tiles / genes.SPLITS)
    return math.ceil(tiles / split_tiles), split_tiles


def smem_bytes(problem: AttentionProblem, genes: LatentWgmmaGenes) -> int:
    """Dynamic shared memory of a block: Q, the ring of K, P, two floats per row, and barriers for Q and each stage."""
    row_bytes = problem.head_dim // CHUNK_COLUMNS * ROW_BYTES
    p_bytes = math.ceil(genes.BLOCK_N / CHUNK_COLUMNS) * ROW_BYTES * genes.BLOCK_M
    rows = genes.BLOCK_M + genes.STAGES * genes.BLOCK_N
    return rows * row_bytes + p_bytes + 2 * 4 * genes.BLOCK_M + 8 + 16 * genes.STAGES


def merge_smem_bytes(problem: AttentionProblem) -> int:
    """Of a block that merges one row: for each thread that has a chunk of four columns of its own O in fp32, in rows of
    eight chunks, and a shift and a sum (`split_merge.cuh`)."""
    chunks = problem.head_dim_v // 4
    return math.ceil(MERGE_THREADS / chunks) * (math.ceil(chunks / 8) * 8 * 16 + 8)


def registers_needed(problem: AttentionProblem, genes: LatentWgmmaGenes) -> int:
    """Estimate of the registers per thread of the first warpgroup: half of O, S, that of the next tile with OVERLAP,
    P, the steps of Q and what is beside them."""
    scores = genes.BLOCK_N // 2 * (2 if genes.OVERLAP else 1)
    return problem.head_dim_v // 4 + scores + genes.BLOCK_N // 4 + 4 * genes.Q_STEPS + FIXED_REGISTERS
