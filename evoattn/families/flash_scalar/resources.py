"""The genes of flash_scalar, and what they take: threads, shared memory, registers, work."""

import math
from typing import Literal

from evoattn.families.genes import Genes, gene
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


class FlashScalarGenes(Genes):
    """The parameters of flash_scalar."""

    BLOCK_M: int = gene("query rows per block", (4, 8, 16, 32, 64, 128))
    BLOCK_N: int = gene("keys per tile", (16, 32, 64, 128))
    THREADS_PER_ROW: int = gene("neighbouring threads that share a query row", (2, 4, 8, 16, 32))
    ROWS_PER_THREAD: int = gene("query rows per thread, all served by one read of K or V", (1, 2, 4, 8))
    VECTOR_WIDTH: int = gene(
        "elements per copy to shared memory and per read of Q and K; also of V where head_dim allows", (1, 2, 4, 8)
    )
    PADDING: int = gene("elements after each row of Q, K and V in shared memory, against bank conflicts", (0, 4, 8))
    KV_STAGES: int = gene(
        "tiles of K and V in shared memory; with 2 the next tile is copied while this one is in use", (1, 2)
    )
    Q_IN_REGISTERS: bool = gene(
        "each thread keeps its query rows as floats in registers; otherwise they are in shared memory"
    )
    P_IN_SHARED: bool = gene(
        "the threads of a row exchange probabilities through shared memory; otherwise by warp shuffles"
    )
    BLOCK_ORDER: Literal["tiles", "heads"] = gene(
        "neighbouring blocks take the query tiles of one head (tiles), or one tile of all heads (heads); the "
        "longest tile first under a causal mask"
    )
    BLOCKS_PER_SM: int = gene("blocks that the registers leave room for on one SM", (1, 2, 3, 4))
    UNROLL: int = gene("unrolling of the inner loops over head_dim and keys", (1, 2, 4))


P_WIDTH = 4
"""Floats a read of P, and the padding of its rows."""
FREE_PADDING, MAX_PADDING = 1.25, 1.5
"""Products P·V over those that head_dim needs: what a wider read of V is worth, and what is refused."""
FIXED_REGISTERS = 44
"""Addresses, loop counters, bounds and copies under way, such that fewer than 1 % of the accepted configs spill under
ptxas 13.0."""
SEGMENTED_HEAD_DIM = 64
"""Beyond it an fp32 kernel keeps partial sums beside the scores (`SEGMENT` in the template)."""


def block_threads(genes: FlashScalarGenes) -> int:
    return genes.BLOCK_M // genes.ROWS_PER_THREAD * genes.THREADS_PER_ROW


def smem_bytes(problem: AttentionProblem, genes: FlashScalarGenes) -> int:
    """Dynamic shared memory of a block in bytes: K and V of all stages, P in fp32, Q."""
    row_bytes = (problem.head_dim + genes.PADDING) * problem.element_bytes
    rows = 2 * genes.KV_STAGES * genes.BLOCK_N + (0 if genes.Q_IN_REGISTERS else genes.BLOCK_M)
    p_floats = genes.BLOCK_M * (genes.BLOCK_N + P_WIDTH) if genes.P_IN_SHARED else 0
    return rows * row_bytes + 4 * p_floats


def width_of_values(problem: AttentionProblem, genes: FlashScalarGenes) -> int:
    """Elements a read of V: VECTOR_WIDTH, halved until a row's threads pad head_dim by at most `FREE_PADDING`."""
    width = genes.VECTOR_WIDTH
    while width > 1 and rounded_up(problem.head_dim, width * genes.THREADS_PER_ROW) > FREE_PADDING * problem.head_dim:
        width //= 2
    return width


def rounded_up(count: int, step: int) -> int:
    return math.ceil(count / step) * step


def outputs(problem: AttentionProblem, genes: FlashScalarGenes) -> int:
    """Elements of one output row that a thread holds."""
    lanes = genes.THREADS_PER_ROW
    return rounded_up(problem.head_dim, width_of_values(problem, genes) * lanes) // lanes


def loop_trips(problem: AttentionProblem, genes: FlashScalarGenes) -> tuple[int, int]:
    """Trips of the two loops that UNROLL unrolls: over head_dim in Q·Kᵀ, over keys in P·V; 1 where the loop is unrolled
    whole."""
    qk = 1 if genes.Q_IN_REGISTERS else problem.head_dim // genes.VECTOR_WIDTH
    pv = genes.BLOCK_N // P_WIDTH if genes.P_IN_SHARED else genes.THREADS_PER_ROW
    return qk, pv


def body_instructions(problem: AttentionProblem, genes: FlashScalarGenes) -> int:
    """Multiply-adds, conversions and loads in the larger of the two unrolled loop bodies."""
    rows, width, keys = (genes.ROWS_PER_THREAD, genes.VECTOR_WIDTH, genes.BLOCK_N // genes.THREADS_PER_ROW)
    conversions = 0 if problem.dtype == "fp32" else 1
    qk_trips, pv_trips = loop_trips(problem, genes)
    qk_elements = problem.head_dim // qk_trips * min(genes.UNROLL, qk_trips)
    qk_operands = keys if genes.Q_IN_REGISTERS else keys + rows
    pv_keys = genes.BLOCK_N // pv_trips * min(genes.UNROLL, pv_trips)
    pv_elements = pv_keys * outputs(problem, genes)
    value_width = width_of_values(problem, genes)
    return max(
        qk_elements * (rows * keys + qk_operands * conversions + qk_operands // width),
        pv_elements * (rows + conversions) + pv_elements // value_width + pv_keys * rows,
    )


def estimated_registers(problem: AttentionProblem, genes: FlashScalarGenes) -> int:
    """Registers per thread that a spill-free compile needs, from the arrays that live at once."""
    rows, width, unroll = genes.ROWS_PER_THREAD, genes.VECTOR_WIDTH, genes.UNROLL
    scores = rows * genes.BLOCK_N // genes.THREADS_PER_ROW
    partial_sums = scores if problem.dtype == "fp32" and problem.head_dim > SEGMENTED_HEAD_DIM else 0
    q = rows * (problem.head_dim if genes.Q_IN_REGISTERS else width * unroll)
    k_or_v = width + max(1, width * problem.element_bytes // 4) * unroll
    maxima_and_sums = 2 * rows
    loads_ahead = (unroll - 1) * scores // 8
    return (
        rows * outputs(problem, genes)
        + scores
        + partial_sums
        + q
        + k_or_v
        + maxima_and_sums
        + loads_ahead
        + FIXED_REGISTERS
    )


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
