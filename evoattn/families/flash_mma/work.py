"""What the kernels of flash_mma do: see `evoattn.families.work`."""

from __future__ import annotations

from evoattn.families.flash_mma.genes import FlashMmaGenes
from evoattn.families.flash_mma.resources import block_warps, registers_needed, ring_stages, smem_bytes, smem_row_bytes
from evoattn.families.residency import WARP, register_cap
from evoattn.families.row_blocks import batches
from evoattn.families.work import (
    CONVERSION,
    LaunchWork,
    Step,
    bias_bytes,
    blocks_of_sequence,
    row_steps,
    tensor_bytes,
    together,
    up_to,
    variant_step,
    visit_share,
)
from evoattn.model.problem import AttentionProblem

MMA_FLOPS, MMA_WAIT, LDMATRIX_WAIT, SHUFFLE_WAIT, BARRIER_WAIT = 4096, 18, 24, 24, 30
"""Floating-point operations of one mma.m16n8k16; clocks until the results of an instruction are there, on any of
these cards to within some ten clocks."""
SCORE_OPERATIONS = {"always": 4.5, "vote": 4.0, "lazy": 3.5}
"""FP32 and conversion instructions per score and lane: scale, maximum, sum, half a conversion."""


def launch_work(problem: AttentionProblem, genes: FlashMmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The one launch."""
    rows, keys, dim = genes.BLOCK_M, genes.BLOCK_N, up_to(problem.head_dim, 16)
    value_dim, v_dim = problem.head_dim_v, up_to(problem.head_dim_v, 16)
    warps, scores = block_warps(genes), genes.BLOCK_M * genes.BLOCK_N
    flops = 2.0 * scores * (dim + v_dim) + (16.0 * scores if genes.ROW_SUM == "mma" else 0.0)
    rescale = rows * value_dim * {"always": 1.0, "vote": 0.3, "lazy": 0.02}[genes.RESCALE] * genes.KEY_WARPS
    lanes = scores * (SCORE_OPERATIONS[genes.RESCALE] - (genes.ROW_SUM == "mma")) + rescale
    q_reads = rows * dim * 2 * genes.KEY_WARPS if genes.Q_PLACE == "shared" else 0
    size = problem.element_of("k").bytes
    fragments = genes.WARPS * keys * (dim + v_dim) * size + q_reads
    copied, loaded = keys * (dim + v_dim) * size, keys * (problem.head_dim + value_dim) * size
    row_tiles = rows // (16 * genes.WARPS)
    shuffles = row_tiles * 4 * (2 if genes.RESCALE != "lazy" else 0) * warps
    issued = flops / MMA_FLOPS + lanes / WARP + scores / WARP + fragments / 512 + 3 * copied / 512 + shuffles
    if problem.kv:  # every warp converts all pairs of its keys
        issued += genes.WARPS * keys * (dim + v_dim) / WARP / 2 * CONVERSION
    barriers = {"split": 2, "split_short_v": 2, "together": 1, "overlapped": 1}[genes.SCHEDULE]
    chained = 1 if genes.SCHEDULE == "overlapped" else 2
    waits = chained * (dim / 16 * 0.5 + 1) * MMA_WAIT + LDMATRIX_WAIT * 2 + barriers * BARRIER_WAIT
    waits += (2 * SHUFFLE_WAIT if genes.RESCALE != "lazy" else 10) + 40
    mean, most, count = row_steps(problem, rows, keys)
    own = blocks_of_sequence(problem, count)
    heads = problem.heads * batches(problem)
    merge = (genes.KEY_WARPS - 1) * rows * value_dim * 4 * 2
    ends = Step(
        instructions=rows * value_dim / WARP * 1.5 + 40 * warps,
        shared_bytes=merge + (rows * v_dim * 4 if genes.O_STORE == "shared" else 0),
        loaded_bytes=rows * (problem.head_dim + value_dim) * 2.0,
        waits=900 + (400 if genes.KEY_WARPS > 1 else 0),
    )
    k_stages, v_stages = ring_stages(genes)
    order = genes.BLOCK_ORDER
    return (
        LaunchWork(
            "flash_mma",
            count * heads,
            WARP * warps,
            warps,
            smem_bytes(problem, genes),
            registers or min(registers_needed(problem, genes), register_cap(warps, genes.BLOCKS_PER_SM)),
            together(
                Step(flops, lanes, scores + rescale / 32, issued, fragments + copied, loaded, waits),
                variant_step(problem, scores),
            ),
            mean,
            most,
            ends,
            longest_first=order == "heads_reversed" if problem.causal else False,
            in_flight_bytes=((k_stages - 1) * problem.head_dim + v_stages * value_dim) * keys * size,
            read_bytes=tensor_bytes(problem, "q", "k", "v") + bias_bytes(problem),
            write_bytes=tensor_bytes(problem, "o"),
            sweep_bytes=tensor_bytes(problem, "k", "v"),
            sweepers=own * problem.group_size,
            visits=own,
            visit_share=visit_share(problem, mean, keys),
            heads_in_turn=problem.kv_heads * batches(problem) if order.startswith("heads") else 1.0,
            genes={
                "rows per warp": rows / genes.WARPS,
                "key warps": genes.KEY_WARPS,
                "stages": genes.STAGES,
                "barriers": barriers,
                "overlapped": genes.SCHEDULE == "overlapped",
                "padded": genes.SMEM_LAYOUT == "padded",
                "q place": ("shared", "registers", "direct").index(genes.Q_PLACE),
                "rescale": ("always", "vote", "lazy").index(genes.RESCALE),
                "sum by mma": genes.ROW_SUM == "mma",
                "direct store": genes.O_STORE == "direct",
                "heads first": order.startswith("heads"),
                "reversed": order.endswith("reversed"),
                "asked blocks": genes.BLOCKS_PER_SM,
                "row bytes": smem_row_bytes(problem.head_dim, size, genes),
            },
        ),
    )
