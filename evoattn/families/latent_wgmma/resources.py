"""What the kernels of latent_wgmma take: threads, shared memory, registers."""

from __future__ import annotations

import math

from evoattn.families.latent_wgmma.genes import LatentWgmmaGenes
from evoattn.families.merge_work import MERGE_THREADS
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ROW_BYTES
from evoattn.model.problem import AttentionProblem

SCORES_ALONE = 3
"""WARPGROUPS of which the first has none of O; of two it has half."""
PRODUCER_REGISTERS = 24
REGISTERS = {2: (240, 240), 3: (152, 168)}
"""Per thread after setmaxnreg, by WARPGROUPS: of the first and of each other one. With those of the copying warpgroup
they are what all four or three have at launch: 240 + 240 + 24 = 3·168, 152 + 2·168 + 24 = 4·128."""
FIXED_REGISTERS = 32
"""Addresses, counters, row sums and shifts beside the operands of wgmma."""


def threads(genes: LatentWgmmaGenes) -> int:
    """Per block: warpgroups that multiply, and one that copies."""
    return 128 * (genes.WARPGROUPS + 1)


def value_columns(problem: AttentionProblem, genes: LatentWgmmaGenes) -> int:
    """Columns of O of a product: half of them, or with 128 registers per thread at launch the most that ptxas takes and
    that make up the half, of 384 columns 64 for 192."""
    half = problem.head_dim_v // 2
    return math.gcd(half, 128) if genes.WARPGROUPS == SCORES_ALONE else half


def tiles_of_p(genes: LatentWgmmaGenes) -> int:
    """Tiles of P in shared memory."""
    return 2 if genes.WARPGROUPS == SCORES_ALONE else 1


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
    """Dynamic shared memory of a block: Q, the ring of K, tiles of P side by side, for each row a float with each of
    them and another, and barriers for Q and each stage."""
    row_bytes = problem.head_dim // CHUNK_COLUMNS * ROW_BYTES
    tiles = tiles_of_p(genes)
    p_bytes = math.ceil(tiles * genes.BLOCK_N / CHUNK_COLUMNS) * ROW_BYTES * genes.BLOCK_M
    rows = genes.BLOCK_M + genes.STAGES * genes.BLOCK_N
    return rows * row_bytes + p_bytes + (1 + tiles) * 4 * genes.BLOCK_M + 8 + 16 * genes.STAGES


def merge_smem_bytes(problem: AttentionProblem) -> int:
    """Of a block that merges one row: for each thread that has a chunk of four columns of its own O in fp32, in rows of
    eight chunks, and a shift and a sum (`split_merge.cuh`)."""
    chunks = problem.head_dim_v // 4
    return math.ceil(MERGE_THREADS / chunks) * (math.ceil(chunks / 8) * 8 * 16 + 8)


def registers_needed(problem: AttentionProblem, genes: LatentWgmmaGenes) -> tuple[int, int]:
    """Estimate of the registers per thread of the first warpgroup, and of the others: half of O, P and what is beside
    them; in the first S, that of the next tile with OVERLAP, and the steps of Q too, and O only if it has a half."""
    half, p = problem.head_dim_v // 4, genes.BLOCK_N // 4
    scores = genes.BLOCK_N // 2 * (2 if genes.OVERLAP else 1) + 4 * genes.Q_STEPS
    alone = genes.WARPGROUPS == SCORES_ALONE
    return scores + p + FIXED_REGISTERS + (0 if alone else half), half + FIXED_REGISTERS + (p if alone else 0)
