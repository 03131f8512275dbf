"""What the kernels of flash_scalar take: threads, shared memory, registers, work."""

from __future__ import annotations

import math

from evoattn.families.flash_scalar.genes import FlashScalarGenes
from evoattn.model.problem import AttentionProblem

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
