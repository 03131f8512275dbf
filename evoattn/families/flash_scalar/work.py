"""What the kernels of flash_scalar do: see `evoattn.families.work`."""

from __future__ import annotations

import math

from evoattn.families.flash_scalar.genes import FlashScalarGenes
from evoattn.families.flash_scalar.resources import (
    block_threads,
    estimated_registers,
    outputs,
    smem_bytes,
    width_of_values,
)
from evoattn.families.residency import WARP, register_cap
from evoattn.families.work import (
    SHARED_LINE,
    LaunchWork,
    Step,
    bank_conflicts,
    blocks_of_sequence,
    row_steps,
    tensor_bytes,
    visit_share,
)
from evoattn.model.problem import AttentionProblem

SHUFFLE_WAIT, BARRIER_WAIT, LOAD_WAIT, FIRST_WAIT = 24, 30, 30, 900


def launch_work(problem: AttentionProblem, genes: FlashScalarGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The one launch."""
    rows, keys, dim, size = genes.BLOCK_M, genes.BLOCK_N, problem.head_dim, problem.element_bytes
    threads = block_threads(genes)
    warps, scores, lanes_of_row = threads // WARP, rows * keys, genes.THREADS_PER_ROW
    qk, pv = _shared_reads(problem, genes)
    columns = outputs(problem, genes) * lanes_of_row
    widened = 0.0 if size == 4 else (scores * dim + scores * columns) / genes.ROWS_PER_THREAD
    q_widened = 0.0 if size == 4 or genes.Q_IN_REGISTERS else rows * lanes_of_row * dim
    fma = scores * (dim + columns) + widened + q_widened + scores * 4.0 + rows * columns
    shuffles = scores * lanes_of_row / WARP * (0 if genes.P_IN_SHARED else 1)
    shuffles += rows * lanes_of_row / WARP * math.log2(lanes_of_row)
    copied = 2.0 * keys * dim * size
    copies = copied / (WARP * genes.VECTOR_WIDTH * size) * (3 if genes.VECTOR_WIDTH * size >= 4 else 5)
    issued = fma / WARP + qk[0] + pv[0] + 2 * shuffles + scores / WARP + copies
    ilp = genes.UNROLL * genes.ROWS_PER_THREAD
    waits = BARRIER_WAIT * (2 if genes.KV_STAGES == 1 else 1) + SHUFFLE_WAIT * math.log2(lanes_of_row)
    waits += LOAD_WAIT * (dim / genes.VECTOR_WIDTH + keys) / max(1, ilp) * 0.3
    mean, most, count = row_steps(problem, rows, keys)
    own = blocks_of_sequence(problem, count)
    ends = Step(instructions=rows * dim / WARP * 2 + 60 * warps, loaded_bytes=2.0 * rows * dim * size, waits=FIRST_WAIT)
    return (
        LaunchWork(
            "flash_scalar",
            count * problem.heads * problem.batch,
            threads,
            warps,
            smem_bytes(problem, genes),
            registers or min(estimated_registers(problem, genes), register_cap(warps, genes.BLOCKS_PER_SM)),
            Step(
                fp32=fma,
                special=scores + rows * lanes_of_row,
                instructions=issued,
                shared_bytes=qk[1] + pv[1] + copied + (4.0 * scores if genes.P_IN_SHARED else 0.0),
                loaded_bytes=copied,
                waits=waits,
            ),
            mean,
            most,
            ends,
            longest_first=problem.causal and genes.BLOCK_ORDER == "heads",
            in_flight_bytes=copied * (genes.KV_STAGES - 0.5),
            read_bytes=tensor_bytes(problem, "q", "k", "v"),
            write_bytes=tensor_bytes(problem, "o"),
            sweep_bytes=tensor_bytes(problem, "k", "v"),
            sweepers=own * problem.group_size,
            visits=own,
            visit_share=visit_share(problem, mean, keys),
            heads_in_turn=problem.kv_heads if genes.BLOCK_ORDER == "heads" else 1.0,
            genes={
                "dot lanes": lanes_of_row,
                "rows per thread": genes.ROWS_PER_THREAD,
                "vector bytes": genes.VECTOR_WIDTH * size,
                "value bytes": width_of_values(problem, genes) * size,
                "stages": genes.KV_STAGES,
                "q registers": genes.Q_IN_REGISTERS,
                "p shared": genes.P_IN_SHARED,
                "padded": genes.PADDING,
                "unroll": genes.UNROLL,
                "asked blocks": genes.BLOCKS_PER_SM,
                "heads first": genes.BLOCK_ORDER == "heads",
                "padded columns": columns / dim,
            },
        ),
    )


def _shared_reads(
    problem: AttentionProblem, genes: FlashScalarGenes
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(warp instructions, bytes' worth of clocks) of the reads of Q, K and of P, V in a step of a block."""
    keys, size, lanes = genes.BLOCK_N, problem.element_bytes, genes.THREADS_PER_ROW
    stride, width = (problem.head_dim + genes.PADDING) * size, genes.VECTOR_WIDTH * size
    threads = block_threads(genes)
    vectors = problem.head_dim / genes.VECTOR_WIDTH
    k_loads = threads / WARP * keys / lanes * vectors
    k_clocks = _clocks(lanes, stride, width)
    q_loads = 0.0 if genes.Q_IN_REGISTERS else threads / WARP * genes.ROWS_PER_THREAD * vectors
    q_clocks = _clocks(WARP // lanes, stride, width)
    value_width = width_of_values(problem, genes)
    v_loads = threads / WARP * keys * outputs(problem, genes) / value_width
    v_clocks = _clocks(lanes, value_width * size, value_width * size)
    p_loads = threads / WARP * genes.ROWS_PER_THREAD * keys / 4 if genes.P_IN_SHARED else 0.0
    p_clocks = _clocks(WARP // lanes, (keys + 4) * 4, 16)
    qk = k_loads * k_clocks + q_loads * q_clocks
    pv = v_loads * v_clocks + p_loads * p_clocks
    return (k_loads + q_loads, qk * SHARED_LINE), (v_loads + p_loads, pv * SHARED_LINE)


def _clocks(different: int, stride: int, width: int) -> float:
    """Clocks of a warp's read in which `different` lanes read vectors of `width` bytes, `stride` apart, and the others
    the same as one of them."""
    return WARP / max(1, SHARED_LINE // max(4, width)) * bank_conflicts(different, stride, width)
