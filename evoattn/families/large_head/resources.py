"""What the kernels of large_head take: threads, shared memory, registers, work."""

from __future__ import annotations

import math

from evoattn.families.large_head.genes import LargeHeadGenes
from evoattn.families.residency import WARP
from evoattn.model.problem import AttentionProblem

VECTOR_BYTES = 16
SEGMENTED = 64
"""Products that a lane adds up before `ScoreProduct` takes them in segments, with a second set of sums."""
QK_PAD, V_PAD, SCORE_PAD = 16, 4, 8
"""Floats between rows in shared memory that the loads of tensor-core fragments want (`large_head.cu.j2`, PADDED)."""
FIXED_REGISTERS, FIXED_TENSOR_REGISTERS = 48, 36
"""Addresses, counters, bounds and vectors under way; fitted to NVRTC 13.0 on sm_89 and sm_90a."""
POINTER_REGISTERS = 16
"""Further addresses of the rows of K and V where these are read from global memory."""


def vector_elements(problem: AttentionProblem) -> int:
    """Elements of a 16-byte load."""
    return VECTOR_BYTES // problem.element_bytes


def slice_elements(problem: AttentionProblem, genes: LargeHeadGenes) -> int:
    """Elements of a row that one block has."""
    return problem.head_dim // genes.DIM_SPLIT


def packed_rows(problem: AttentionProblem) -> int:
    """Query rows that share a K/V head: its group's query heads, one below the other."""
    return problem.group_size * problem.seqlen_q


def is_fused(genes: LargeHeadGenes) -> bool:
    return genes.EXCHANGE != "workspace"


def on_tensor_cores(genes: LargeHeadGenes) -> bool:
    return genes.MATH != "fma"


def is_spread(genes: LargeHeadGenes) -> bool:
    """Whether warps that share a tile of scores have parts of the slice, right from global memory, and their sums are
    added up."""
    return genes.MATH == "tf32x3_spread"


def padded_row(elements: int, pad: int, genes: LargeHeadGenes) -> int:
    """Elements from one row to the next in shared memory."""
    return elements + (pad if on_tensor_cores(genes) else 0)


def k_bytes(problem: AttentionProblem, genes: LargeHeadGenes) -> int:
    """One tile of K in shared memory."""
    return genes.BLOCK_N * padded_row(slice_elements(problem, genes), QK_PAD, genes) * problem.element_bytes


def _v_bytes(problem: AttentionProblem, genes: LargeHeadGenes) -> int:
    """One tile of V in shared memory."""
    return genes.BLOCK_N * padded_row(slice_elements(problem, genes), V_PAD, genes) * problem.element_bytes


def q_bytes(problem: AttentionProblem, genes: LargeHeadGenes) -> int:
    row = padded_row(slice_elements(problem, genes), QK_PAD, genes) * problem.element_bytes
    return genes.BLOCK_M * row if genes.Q_PLACE == "shared" else 0


def smem_bytes(problem: AttentionProblem, genes: LargeHeadGenes) -> tuple[int, int]:
    """Dynamic shared memory of `large_head_scores` and of `large_head`.

    Q and a tile of K, or a tile of sums per warp; Q, the stages of K and V, those sums, in a cluster a tile of partial
    scores and what `cluster_sum.cuh` receives, a tile of scores for each group that adds up partial ones, two factors a
    row. Without a first launch the second has Q and K, with one it has V alone.
    """
    stages, rows, keys = genes.STAGES, genes.BLOCK_M, genes.BLOCK_N
    q, v, k = q_bytes(problem, genes), _v_bytes(problem, genes), 0 if is_spread(genes) else k_bytes(problem, genes)
    sums = 4 * genes.WARPS * genes.SCORE_ROWS * genes.SCORE_KEYS if is_spread(genes) else 0
    inputs = q + stages * (k + v) + sums if is_fused(genes) else stages * v
    tile, partials = 4 * rows * padded_row(keys, SCORE_PAD, genes), 0
    if genes.EXCHANGE == "cluster":
        split, vectors = genes.DIM_SPLIT, rows * keys // 4
        partials = tile + 16 * split * math.ceil(vectors / split) + 16
    scores = _sum_groups(genes) * tile
    return q + min(stages, 1) * k + sums, inputs + partials + scores + 8 * rows


def _sum_groups(genes: LargeHeadGenes) -> int:
    """Tiles in which the second launch adds up partial scores, so that all its threads have some."""
    if is_fused(genes):
        return 1
    return max(1, min(genes.DIM_SPLIT, 4 * WARP * genes.WARPS // (genes.BLOCK_M * genes.BLOCK_N)))


def registers_needed(problem: AttentionProblem, genes: LargeHeadGenes) -> int:
    """Estimate of the registers per thread below which ptxas spills: the output tile beside the larger of the two
    products' operands."""
    if on_tensor_cores(genes):
        return _tensor_registers(problem, genes)
    vector, unroll = vector_elements(problem), genes.UNROLL
    rows, keys = genes.SCORE_ROWS, genes.SCORE_KEYS
    chunks = slice_elements(problem, genes) // vector
    output_rows = warp_output_rows(genes)
    vectors = math.ceil(chunks / genes.VALUE_THREADS)
    output = output_rows * vectors * vector
    sums = rows * keys * (2 if math.ceil(chunks / genes.LANES) * vector > SEGMENTED else 1)
    score = sums + rows * vector + vector + 2 * (rows + keys) + (unroll - 1) * vector
    value = 4 * output_rows + vector * min(vectors, 2) + (unroll - 1) * vector
    return output + max(score, value) + FIXED_REGISTERS + _softmax_registers(genes)


def warp_output_rows(genes: LargeHeadGenes) -> int:
    """Output rows of a thread, or of a warp of tensor-core products."""
    return genes.BLOCK_M * genes.VALUE_THREADS // (WARP * genes.WARPS)


def _softmax_registers(genes: LargeHeadGenes) -> int:
    """A maximum and a sum for each row of a warp."""
    return 2 * math.ceil(genes.BLOCK_M / genes.WARPS)


def _tensor_registers(problem: AttentionProblem, genes: LargeHeadGenes) -> int:
    """`registers_needed` where the products are fragments: fp32 sums, and operands of which each float is two."""
    rows, keys, unroll = genes.SCORE_ROWS, genes.SCORE_KEYS, min(genes.UNROLL, 2)
    output_rows, runs = warp_output_rows(genes), slice_elements(problem, genes) // genes.VALUE_THREADS
    output = output_rows * runs + 2 * runs
    score = rows * keys // WARP + unroll * (rows + 12) + 2 * (rows // 8 + keys // 8)
    if is_spread(genes):  # but where copies of V follow them, ptxas puts off loads that would spill
        ahead = min(unroll, slice_elements(problem, genes) // (16 * spread_parts(genes))) if is_fused(genes) else 1
        score = rows * keys // WARP + ahead * (rows + keys) // 2 + rows
    value = output_rows + unroll * (output_rows // 2 + 16)
    larger = output + max(score, value) if is_fused(genes) else max(score, output + value)
    pointers = POINTER_REGISTERS if genes.STAGES == 0 else 0
    return larger + pointers + FIXED_TENSOR_REGISTERS + _softmax_registers(genes)


def spread_parts(genes: LargeHeadGenes) -> int:
    """Warps that share a tile of scores with MATH=tf32x3_spread; 0 or 1 if none do."""
    tiles = genes.BLOCK_M // genes.SCORE_ROWS * (genes.BLOCK_N // genes.SCORE_KEYS)
    return genes.WARPS // tiles if tiles else 0


def workspace_bytes(problem: AttentionProblem, genes: LargeHeadGenes) -> dict[str, int]:
    if is_fused(genes):
        return {}
    tiles = math.ceil(packed_rows(problem) / genes.BLOCK_M) * math.ceil(problem.seqlen_k / genes.BLOCK_N)
    return {"partials": 4 * problem.batch * problem.kv_heads * tiles * genes.DIM_SPLIT * genes.BLOCK_M * genes.BLOCK_N}
