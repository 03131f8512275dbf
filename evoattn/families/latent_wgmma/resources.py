"""The genes of latent_wgmma, and what they take: threads, shared memory, registers, work."""

import math
from typing import Literal

from evoattn.families.genes import Genes, gene
from evoattn.families.latent import row_blocks
from evoattn.families.residency import WARP
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ELEMENT_BYTES, ROW_BYTES
from evoattn.families.work import LaunchWork, Step, merge_work, row_steps, tensor_bytes
from evoattn.model.problem import AttentionProblem


class LatentWgmmaGenes(Genes):
    """The parameters of latent_wgmma."""

    BLOCK_M: int = gene("query heads of a tile, those of one query that share a K/V head", (64,))
    BLOCK_N: int = gene("keys per tile", (16, 32, 48, 64, 80, 96, 112, 128))
    STAGES: int = gene("tiles of K in shared memory", (2, 3, 4, 5, 6, 8))
    RESCALE: Literal["always", "lazy_5", "lazy_8"] = gene(
        "O is rescaled after every tile of keys (always), or only if a score reaches the shift, 2^5 or 2^8 above "
        "the first maximum (lazy_5, lazy_8)"
    )
    SPLITS: int = gene(
        "blocks that share the keys of the same rows; their results are added up by a second kernel",
        (*range(1, 15), 16, 18, 20, 22, 24, 26, 32, 33, 44, 48, 64, 66, 96, 128),
    )
    OVERLAP: bool = gene("multiply Q and K of a tile of keys during the softmax of the one before", default=False)
    Q_STEPS: int = gene(
        "steps of 16 columns of Q that stay in registers; the others are read from shared memory for every tile",
        (0, 4, 8, 16, 24),
        default=0,
    )
    WARPGROUPS: int = gene(
        "that multiply: the first makes the scores and half of the output (2), or the scores alone (3)",
        (2, 3),
        default=2,
    )
    DEPENDENT_LAUNCH: bool = gene(
        "the kernel that adds up splits is launched before the first has ended, and waits for it itself", default=False
    )


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


def split_of(problem: AttentionProblem, genes: LatentWgmmaGenes) -> tuple[int, int]:
    """(splits, tiles of keys per split): SPLITS or fewer, none of them empty."""
    tiles = math.ceil(problem.seqlen_k / genes.BLOCK_N)
    split_tiles = math.ceil(tiles / genes.SPLITS)
    return math.ceil(tiles / split_tiles), split_tiles


def filled_splits(problem: AttentionProblem, genes: LatentWgmmaGenes) -> float:
    """Splits that have keys, on average over sequences."""
    splits, split_tiles = split_of(problem, genes)
    if not problem.seqused:
        return splits
    keys = genes.BLOCK_N * split_tiles
    found = [max(1, min(splits, math.ceil(length / keys))) for length in problem.key_lengths]
    return sum(found) / len(found)


def smem_bytes(problem: AttentionProblem, genes: LatentWgmmaGenes) -> int:
    """Dynamic shared memory of a block: Q, the ring of K, tiles of P side by side, for each row a float with each of
    them and another, and barriers for Q and each stage."""
    row_bytes = problem.head_dim // CHUNK_COLUMNS * ROW_BYTES
    tiles = tiles_of_p(genes)
    p_bytes = math.ceil(tiles * genes.BLOCK_N / CHUNK_COLUMNS) * ROW_BYTES * genes.BLOCK_M
    rows = genes.BLOCK_M + genes.STAGES * genes.BLOCK_N
    words = 2 * (8 if problem.seqused else 4)  # flash_wgmma's two places for a tile of rows
    return rows * row_bytes + p_bytes + (1 + tiles) * 4 * genes.BLOCK_M + 24 + 16 * genes.STAGES + 4 * words


def registers_needed(problem: AttentionProblem, genes: LatentWgmmaGenes) -> tuple[int, int]:
    """Estimate of the registers per thread of the first warpgroup, and of the others: half of O, P and what is beside
    them; in the first S, that of the next tile with OVERLAP, and the steps of Q too, and O only if it has a half."""
    half, p = problem.head_dim_v // 4, genes.BLOCK_N // 4
    alone = genes.WARPGROUPS == SCORES_ALONE
    scores = genes.BLOCK_N // 2 * (2 if genes.OVERLAP and not alone else 1) + 4 * genes.Q_STEPS
    return scores + p + FIXED_REGISTERS + (0 if alone else half), half + FIXED_REGISTERS + (p if alone else 0)


SOFTMAX_WAIT, OVERLAPPED_WAIT, FIRST_WAIT = 350, 100, 1500
"""Clocks, estimates: of a tile's softmax, beside which no product runs, or one does; of a block's first loads and last
stores."""
LAUNCH_REGISTERS = {2: 168, 3: 128}
"""Per thread, before setmaxnreg moves them, by WARPGROUPS."""
SCORE_OPERATIONS = {"always": 4.5, "lazy_5": 4.0, "lazy_8": 4.0}
"""Lane operations per score, by RESCALE, as for flash_wgmma."""


def launch_work(problem: AttentionProblem, genes: LatentWgmmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The launch over the keys, and with several splits that which merges them."""
    rows, keys, dim, value_dim = genes.BLOCK_M, genes.BLOCK_N, problem.head_dim, problem.head_dim_v
    scores, (splits, split_tiles) = rows * keys, split_of(problem, genes)
    rescaled = rows * value_dim if genes.RESCALE == "always" else 0
    factors = 4.0 * rows if genes.RESCALE == "always" else 0.0  # each of a row's four lanes finds its own
    lanes = scores * SCORE_OPERATIONS[genes.RESCALE] + rescaled
    tile_bytes = keys * dim * ELEMENT_BYTES
    alone = genes.WARPGROUPS == SCORES_ALONE
    p_bytes = rows * keys * ELEMENT_BYTES
    out_bytes = rows * value_dim * (2.0 if splits == 1 else 4.0)
    tiles = row_blocks(problem, genes.BLOCK_M) * problem.kv_heads * problem.batch
    mean, most, _ = row_steps(problem, 1, keys)
    filled = filled_splits(problem, genes)
    scratch = float(tiles * filled * rows * (value_dim * 4 + 8)) if splits > 1 else 0.0
    common = {
        "stages": genes.STAGES,
        "rescale": ("always", "lazy_5", "lazy_8").index(genes.RESCALE),
        "overlapped": genes.OVERLAP,
        "q registers": genes.Q_STEPS > 0,
        "splits": splits,
        "filled rows": problem.group_size * problem.seqlen_q / (row_blocks(problem, genes.BLOCK_M) * rows),
    }
    first = LaunchWork(
        "latent_wgmma",
        round(tiles * filled),
        threads(genes),
        threads(genes) // WARP - 4,
        smem_bytes(problem, genes),
        registers or LAUNCH_REGISTERS[genes.WARPGROUPS],
        Step(
            2.0 * scores * (dim + value_dim),
            lanes,
            scores + factors,
            (2 * (lanes - rescaled + scores) + rescaled / 2) / WARP + 130 * 8,
            tile_bytes * (2 + value_dim / dim)
            + rows * (dim - 16 * genes.Q_STEPS) * ELEMENT_BYTES
            + (3 if alone else 4) * p_bytes,
            tile_bytes,
            OVERLAPPED_WAIT if genes.OVERLAP or alone else SOFTMAX_WAIT,
        ),
        max(1.0, mean / filled),
        max(1, min(split_tiles, most)),
        Step(
            tensor_flops=2.0 * scores * dim * genes.OVERLAP,  # scores of the last tile once more
            instructions=rows * value_dim / WARP * 1.5 + 60 * 8,
            shared_bytes=2.0 * out_bytes,
            loaded_bytes=rows * dim * ELEMENT_BYTES + out_bytes,
            waits=FIRST_WAIT,
        ),
        tensor="wgmma",
        in_flight_bytes=(genes.STAGES - 1) * tile_bytes,
        read_bytes=tensor_bytes(problem, "q", "k", "v"),
        write_bytes=scratch or tensor_bytes(problem, "o"),
        sweep_bytes=tensor_bytes(problem, "k", "v"),
        sweepers=float(row_blocks(problem, genes.BLOCK_M)),
        genes=common,
    )
    if splits == 1:
        return (first,)
    return first, merge_work("latent_wgmma_merge", problem, round(filled), scratch, common, genes.DEPENDENT_LAUNCH)
