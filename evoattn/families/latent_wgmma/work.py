"""What the kernels of latent_wgmma do: see `evoattn.families.work`."""

from __future__ import annotations

from evoattn.families.latent_wgmma.genes import LatentWgmmaGenes
from evoattn.families.latent_wgmma.resources import SCORES_ALONE, row_blocks, smem_bytes, split_of, threads
from evoattn.families.merge_work import merge_work
from evoattn.families.residency import WARP
from evoattn.families.work import LaunchWork, Step, row_steps, tensor_bytes
from evoattn.model.problem import AttentionProblem

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
    tile_bytes = keys * dim * 2.0
    alone = genes.WARPGROUPS == SCORES_ALONE
    p_bytes = rows * keys * 2.0
    out_bytes = rows * value_dim * (2.0 if splits == 1 else 4.0)
    tiles = row_blocks(problem, genes) * problem.kv_heads * problem.batch
    mean, most, _ = row_steps(problem, 1, keys)
    scratch = float(tiles * splits * rows * (value_dim * 4 + 8)) if splits > 1 else 0.0
    common = {
        "stages": genes.STAGES,
        "rescale": ("always", "lazy_5", "lazy_8").index(genes.RESCALE),
        "overlapped": genes.OVERLAP,
        "q registers": genes.Q_STEPS > 0,
        "splits": splits,
        "filled rows": problem.group_size * problem.seqlen_q / (row_blocks(problem, genes) * rows),
    }
    first = LaunchWork(
        "latent_wgmma",
        tiles * splits,
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
            + rows * (dim - 16 * genes.Q_STEPS) * 2.0
            + (3 if alone else 4) * p_bytes,
            tile_bytes,
            OVERLAPPED_WAIT if genes.OVERLAP or alone else SOFTMAX_WAIT,
        ),
        max(1.0, mean / splits),
        max(1, min(split_tiles, most)),
        Step(
            tensor_flops=2.0 * scores * dim * genes.OVERLAP,  # scores of the last tile once more
            instructions=rows * value_dim / WARP * 1.5 + 60 * 8,
            shared_bytes=2.0 * out_bytes,
            loaded_bytes=rows * dim * 2.0 + out_bytes,
            waits=FIRST_WAIT,
        ),
        tensor="wgmma",
        in_flight_bytes=(genes.STAGES - 1) * tile_bytes,
        read_bytes=tensor_bytes(problem, "q", "k", "v"),
        write_bytes=scratch or tensor_bytes(problem, "o"),
        sweep_bytes=tensor_bytes(problem, "k", "v"),
        sweepers=float(row_blocks(problem, genes)),
        genes=common,
    )
    if splits == 1:
        return (first,)
    return first, merge_work("latent_wgmma_merge", problem, splits, scratch, common, genes.DEPENDENT_LAUNCH)
