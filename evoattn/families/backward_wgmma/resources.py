"""What the kernels of backward_wgmma take: warpgroups, registers, shared memory, scratch."""

from __future__ import annotations

import math

from evoattn.families import backward
from evoattn.families.backward_wgmma.genes import BackwardWgmmaGenes
from evoattn.families.residency import register_cap
from evoattn.families.row_blocks import batches, row_blocks
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ROW_BYTES
from evoattn.model.backward import parse_grads
from evoattn.model.problem import AttentionProblem

WARPGROUP, GROUP_KEYS = 128, 64
PRODUCER_REGISTERS = {1: 40, 2: 24, 3: 32}
"""Per thread of the producer warpgroup after setmaxnreg, by consumer warpgroups, as in flash_wgmma."""
SPARE_REGISTERS = 40
"""Per thread of warps that make rows, if the consumers can spare so many: for two rows at once."""
MAX_CONSUMER_REGISTERS = 240
FIXED_REGISTERS = {"in_turn": 8, "dp_first": 24, "sums_first": 22, "softmax_first": 22}
"""Addresses, counters and terms of queries beside the arrays of `Fragments`, by ORDER: with in_turn S and dP are not
both alive where most is. Fitted to 80 random configs compiled by ptxas 13.0."""


BIAS_REGISTERS, BIAS_GRADIENT_REGISTERS, SLOPE_REGISTERS = 48, 24, 8
"""Of places and bounds. Read off 24 configs compiled by ptxas 13.0."""


def key_groups(genes: BackwardWgmmaGenes) -> int:
    """Groups of 64 keys of a block."""
    return genes.BLOCK_N // GROUP_KEYS


def warpgroups(genes: BackwardWgmmaGenes) -> int:
    """Consumer warpgroups."""
    return key_groups(genes) * genes.DIM_GROUPS


def producer_warps(genes: BackwardWgmmaGenes) -> int:
    return 4 if genes.PRODUCER == "warpgroup" else 1


def threads(genes: BackwardWgmmaGenes) -> int:
    """Threads per block of the main launch."""
    return WARPGROUP * warpgroups(genes) + 32 * producer_warps(genes)


def registers_at_launch(genes: BackwardWgmmaGenes) -> int:
    """Registers per thread under the launch bounds."""
    return register_cap(threads(genes) // 32, genes.BLOCKS_PER_SM)


def moved_registers(genes: BackwardWgmmaGenes) -> tuple[int, int]:
    """(producer's, consumers') registers per thread after setmaxnreg, (0, 0) without: as in flash_wgmma."""
    if genes.PRODUCER != "warpgroup":
        return 0, 0
    consumers, launch = warpgroups(genes), min(registers_at_launch(genes) + 1, 256) // 8 * 8
    producer = PRODUCER_REGISTERS[consumers]
    if genes.ROW_WORK == "spare_warps" and genes.DS_PLACE == "shared":  # else ptxas has products wait in turn (C7512)
        producer = max(producer, SPARE_REGISTERS)
    consumer = ((consumers + 1) * launch - producer) // consumers // 8 * 8
    return producer, min(consumer, MAX_CONSUMER_REGISTERS)


def whole_chunks(dim: int) -> int:
    """Columns up to whole 64-column chunks."""
    return math.ceil(dim / CHUNK_COLUMNS) * CHUNK_COLUMNS


def dq_columns(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Columns of a warpgroup's part of dQ, or, DQ_ROWS=dims, queries; 0 where the warpgroups cannot share dQ."""
    columns, groups = whole_chunks(problem.head_dim), warpgroups(genes)
    if genes.DQ_ROWS == "dims":
        return genes.BLOCK_M if columns == CHUNK_COLUMNS * groups else 0
    rows = genes.BLOCK_M // GROUP_KEYS
    if genes.BLOCK_M % GROUP_KEYS or groups % rows:
        return 0
    parts = groups // rows
    return columns // parts if columns % (parts * CHUNK_COLUMNS) == 0 else 0


def registers_needed(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Estimate of the registers per consumer thread below which ptxas spills: dK and dV, S and dP of a tile, what is
    rounded, and dQ in the place of dP."""
    scores, dq = genes.BLOCK_M // genes.DIM_GROUPS // 2, dq_columns(problem, genes) // 2
    kept = (problem.head_dim + problem.head_dim_v) // genes.DIM_GROUPS // 2
    rounded = (scores // 2) * ((genes.P_PLACE == "registers") + (genes.DS_PLACE == "registers"))
    wanted = parse_grads(problem.grads)
    at_once = genes.P_PLACE == "registers" and "bias" not in wanted  # factors of the scores' gradients
    if problem.own_score or (problem.softcap and (problem.alibi or problem.bias or not at_once)):
        kept += scores
    kept += SLOPE_REGISTERS * problem.alibi + BIAS_REGISTERS * bool(problem.bias)
    kept += BIAS_GRADIENT_REGISTERS * ("bias" in wanted)
    if genes.ORDER == "dp_first":
        return kept + 2 * scores + max(dq, rounded) + FIXED_REGISTERS[genes.ORDER]
    return kept + scores + max(scores, dq) + rounded + FIXED_REGISTERS[genes.ORDER]


def smem_bytes(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Dynamic shared memory of a block: see `templates/backward_wgmma/shared_layout.cuh`."""
    rows = whole_chunks(problem.head_dim) * 2
    value_rows = whole_chunks(problem.head_dim_v) * 2
    scores = key_groups(genes) * math.ceil(genes.BLOCK_M / 64) * GROUP_KEYS * ROW_BYTES
    tiles = genes.BLOCK_N * (rows + value_rows)
    tiles += genes.BLOCK_M * (genes.Q_STAGES * rows + genes.DO_STAGES * value_rows)
    tiles += scores * genes.DS_STAGES * (1 + (genes.P_PLACE == "shared"))
    sums = 64 * dq_columns(problem, genes) * 4 * warpgroups(genes) if genes.DQ_SUM != "registers" else 0
    terms = 4 * genes.BLOCK_M * (genes.Q_STAGES + genes.DO_STAGES)
    barriers = 2 + 2 * genes.Q_STAGES + 2 * genes.DO_STAGES + 2 * warpgroups(genes) * (genes.DQ_SUM == "warp")
    return tiles + sums + terms + 8 * barriers


def query_tiles(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Tiles of queries of all heads and batches."""
    return row_blocks(problem, genes.BLOCK_M) * problem.heads * batches(problem)


def key_blocks(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> int:
    """Tiles of keys of a K/V head, or slots of packed sequences."""
    return backward.key_blocks(problem, genes.BLOCK_N)


def scratch(problem: AttentionProblem, genes: BackwardWgmmaGenes) -> dict[str, int]:
    """Bytes of the terms of the queries, and of dQ in float32."""
    terms = 4 * genes.BLOCK_M * query_tiles(problem, genes)
    found = {"log_sums": terms, "deltas": terms, "dq_sums": terms * whole_chunks(problem.head_dim)}
    return found | ({"progress": 8 * units(problem)} if genes.ROW_WORK == "spare_warps" else {})


def units(problem: AttentionProblem) -> int:
    """K/V heads of all batches."""
    return problem.kv_heads * batches(problem)


def lead(problem: AttentionProblem, genes: BackwardWgmmaGenes, sms: int) -> int:
    """So many K/V heads ahead a block of ROW_WORK=spare_warps begins rows of queries, and ends those of as many behind:
    those that run at once on so many SMs and one more, so that none waits, and twice as many where some blocks take
    twice as long as others do; half of all at most. 0 with ROW_WORK=launches."""
    if genes.ROW_WORK == "launches":
        return 0
    uneven = problem.causal and not problem.window
    running = math.ceil((1 + uneven) * sms * genes.BLOCKS_PER_SM / key_blocks(problem, genes)) + 1
    return max(1, min(running, units(problem) // 2))
