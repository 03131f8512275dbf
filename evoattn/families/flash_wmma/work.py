"""What the kernels of flash_wmma do: see `evoattn.families.work`."""

from __future__ import annotations

import math

from evoattn.families.flash_wmma.genes import FlashWmmaGenes
from evoattn.families.flash_wmma.resources import TILE, block_warps, registers_needed, smem_bytes, tiles_of_head
from evoattn.families.residency import WARP, register_cap
from evoattn.families.work import LaunchWork, Step, bank_conflicts, blocks_of_sequence, row_steps, tensor_bytes
from evoattn.model.problem import AttentionProblem

MMA_WAIT, SHUFFLE_WAIT, BARRIER_WAIT, LOAD_WAIT, FIRST_WAIT = 36, 24, 30, 60, 1100
FRAGMENT_BYTES = TILE * TILE * 2


def launch_work(problem: AttentionProblem, genes: FlashWmmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The one launch. Scores go through shared memory, and so does O where it lives there."""
    rows, keys, dim_tiles = genes.BLOCK_M, genes.BLOCK_N, tiles_of_head(problem)
    warps, scores, dim = block_warps(genes), genes.BLOCK_M * genes.BLOCK_N, dim_tiles * TILE
    flops = 4.0 * scores * dim
    row_tiles = rows // (TILE * genes.ROW_WARPS)
    kv_fragments = 2.0 * genes.ROW_WARPS * keys * dim * 2
    q_fragments = rows * dim * 2.0 * keys / TILE if genes.Q_PLACE == "shared" else 0.0
    p_fragments = rows * keys * 2.0 * (math.ceil(dim_tiles / genes.COLUMN_WARPS) if genes.O_PLACE == "shared" else 1)
    p_fragments *= genes.COLUMN_WARPS
    row_bytes = dim * 2 + genes.PADDING_BYTES
    conflicts = bank_conflicts(8, row_bytes, 16)
    s_conflicts = bank_conflicts(8, 4 * keys + genes.PADDING_BYTES, 8) / 2
    o_traffic = rows * dim * 4.0 * 3 if genes.O_PLACE == "shared" else rows * 4.0
    shared = (kv_fragments + q_fragments) * conflicts + p_fragments * max(1.0, s_conflicts)
    shared += scores * 4.0 * 2 * max(1.0, s_conflicts) + scores * 2.0 + o_traffic
    copied = 2.0 * keys * dim * 2
    loads = (kv_fragments + q_fragments + p_fragments) / FRAGMENT_BYTES * 4
    lanes = scores * 5.0 + rows * dim
    shuffles = rows * genes.THREADS_PER_ROW / WARP * math.log2(genes.THREADS_PER_ROW) * 2
    issued = flops / 4096 + lanes / WARP + scores / WARP * 2 + loads + shuffles + 3 * copied / 512 + o_traffic / 512
    passes = math.ceil(TILE * row_tiles * genes.THREADS_PER_ROW / (WARP * genes.COLUMN_WARPS))
    waits = 2 * (dim_tiles * 0.5 + 1) * MMA_WAIT + BARRIER_WAIT * (4 if genes.COLUMN_WARPS > 1 else 2)
    waits += passes * (SHUFFLE_WAIT * math.log2(genes.THREADS_PER_ROW) + 40) * 0.5 + LOAD_WAIT * 3
    if genes.COPY == "registers":
        waits += 500
    mean, most, count = row_steps(problem, rows, keys)
    own = blocks_of_sequence(problem, count)
    return (
        LaunchWork(
            "flash_wmma",
            count * problem.heads * problem.batch,
            WARP * warps,
            warps,
            smem_bytes(problem, genes),
            registers or min(registers_needed(problem, genes), register_cap(warps, genes.BLOCKS_PER_SM)),
            Step(flops, lanes, scores + rows, issued, shared + copied, 2.0 * keys * problem.head_dim * 2, waits),
            mean,
            most,
            Step(
                instructions=rows * dim / WARP * 3 + 60 * warps,
                shared_bytes=rows * dim * 8.0,
                loaded_bytes=2.0 * rows * problem.head_dim * 2,
                waits=FIRST_WAIT,
            ),
            in_flight_bytes=copied * (genes.STAGES - 0.5) if genes.COPY == "async" else copied / 2,
            read_bytes=tensor_bytes(problem, "q", "k", "v"),
            write_bytes=tensor_bytes(problem, "o"),
            sweep_bytes=tensor_bytes(problem, "k", "v"),
            sweepers=own * problem.group_size,
            heads_in_turn=1.0,
            genes={
                "rows per warp": rows / genes.ROW_WARPS,
                "column warps": genes.COLUMN_WARPS,
                "dot lanes": genes.THREADS_PER_ROW,
                "stages": genes.STAGES,
                "by registers": genes.COPY == "registers",
                "padded": genes.PADDING_BYTES,
                "q registers": genes.Q_PLACE == "fragments",
                "o shared": genes.O_PLACE == "shared",
            },
        ),
    )
