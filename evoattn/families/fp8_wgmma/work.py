"""What the kernels of fp8_wgmma do: see `evoattn.families.work`."""

from __future__ import annotations

from dataclasses import replace

from evoattn.families.flash_wgmma import resources as flash
from evoattn.families.flash_wgmma.resources import moved_registers, registers_at_launch, warpgroups
from evoattn.families.fp8_wgmma.genes import Fp8WgmmaGenes
from evoattn.families.fp8_wgmma.resources import begins_ahead, registers_needed, smem_bytes
from evoattn.families.residency import WARP
from evoattn.families.work import LaunchWork, Step, together, up_to, variant_step
from evoattn.model.problem import AttentionProblem

RATE = 2
"""Times as many products a clock as of 16 bits: `tensor_flops` count those."""


def launch_work(problem: AttentionProblem, genes: Fp8WgmmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The one launch: flash_wgmma's, but for the tiles of keys, what a block keeps, and half of the bytes of Q."""
    [launch] = flash.launch_work(problem, genes.flash, registers)
    rows, keys, groups = genes.BLOCK_M, genes.BLOCK_N, warpgroups(genes.flash)
    have = moved_registers(genes.flash)[1] or registers_at_launch(genes.flash)
    numbers = dict(launch.genes) | {
        "begins ahead": begins_ahead(problem, genes),
        "spare registers": have - registers_needed(problem, genes),
        "flush tiles": genes.FLUSH_TILES,
    }
    return (
        replace(
            launch,
            kernel="fp8_wgmma",
            smem_bytes=smem_bytes(problem, genes),
            step=together(variant_step(problem, rows * keys), _step(problem, genes, groups)),
            ends=replace(launch.ends, loaded_bytes=launch.ends.loaded_bytes - rows * problem.head_dim),
            in_flight_bytes=launch.in_flight_bytes / 2,
            genes=numbers,
        ),
    )


def _step(problem: AttentionProblem, genes: Fp8WgmmaGenes, groups: int) -> Step:
    """A block's work on a tile of keys, but for a variant's own."""
    rows, keys, value_dim = genes.BLOCK_M, genes.BLOCK_N, problem.head_dim_v
    scores, polynomial = rows * keys, genes.POLYNOMIAL_EIGHTHS / 8
    shared = rows * value_dim / genes.FLUSH_TILES if genes.SUM_PLACE == "shared" else 0
    lanes = scores * (flash.SCORE_OPERATIONS["always"] + 0.5 + 5 * polynomial) + rows * value_dim + shared
    width = up_to(problem.head_dim, 32) + value_dim
    tile_bytes = keys * (up_to(problem.head_dim, 128) + value_dim)
    loaded = keys * up_to(value_dim, 128)
    reads = groups * tile_bytes + (0 if genes.Q_IN_REGISTERS else rows * up_to(problem.head_dim, 32))
    return Step(
        2.0 * scores * width / RATE,
        lanes,
        scores * (1 - polynomial),
        lanes / WARP + scores * (1 - polynomial) / WARP + 20 * 4 * groups,
        reads + tile_bytes + 2.0 * loaded + 8.0 * shared,
        keys * (problem.head_dim + value_dim),
        flash.SOFTMAX_WAIT + (40 if genes.PING_PONG else 0),
    )
