"""What the kernels of backward_mma take: threads, shared memory, scratch, registers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from evoattn.families.backward import key_blocks
from evoattn.families.backward_mma.genes import BackwardMmaGenes
from evoattn.families.backward_mma.tables import registers_of
from evoattn.families.row_blocks import batches, row_blocks
from evoattn.model.backward import parse_grads
from evoattn.model.problem import AttentionProblem

CHUNK_BYTES = 16
BLOCK_STATES = "block_states"
"""The scratch buffer of what each block is by a block list."""
ROW_THREADS = 256
"""Of a block of the first launch, and of one that converts sums."""


def adds_dq(genes: BackwardMmaGenes) -> bool:
    return genes.DQ == "add"


IDLE = {"DQ_WARPS": 1, "PASS_M": 64, "PASS_N": 64, "PASS_WARPS": 4, "PASS_STAGES": 1}
"""What genes must be that do nothing."""


def idle_as_one(genes: BackwardMmaGenes) -> BackwardMmaGenes:
    """Those genes that do nothing with the others as `IDLE` has them."""
    idle: dict[str, Any] = {name: value for name, value in IDLE.items() if name.startswith("PASS") == adds_dq(genes)}
    return replace(genes, **idle)


def block_warps(genes: BackwardMmaGenes) -> int:
    """Of a block of keys."""
    return genes.WARPS * genes.QUERY_WARPS


def padded_dim(head_dim: int) -> int:
    """Up to whole k16 steps."""
    return math.ceil(head_dim / 16) * 16


def row_bytes(columns: int, genes: BackwardMmaGenes) -> int:
    """Bytes of a row of so many 16-bit columns in shared memory."""
    return columns * 2 + (CHUNK_BYTES if genes.SMEM_LAYOUT == "padded" else 0)


def smem_bytes(problem: AttentionProblem, genes: BackwardMmaGenes) -> int:
    """Dynamic shared memory of a block of keys: K and V as far as they are read there, the rings of Q, dO and of two
    floats for each row, dS and P; in their place later dK and dV."""
    dim, value_dim = (row_bytes(padded_dim(n), genes) for n in (problem.head_dim, problem.head_dim_v))
    keys = genes.BLOCK_N * (dim * (genes.KV_PLACE != "registers" or adds_dq(genes)))
    keys += genes.BLOCK_N * value_dim * (genes.KV_PLACE == "shared")
    scores = genes.BLOCK_N * row_bytes(genes.BLOCK_M, genes)
    shared = genes.QUERY_WARPS > 1
    loop = keys + genes.STAGES * genes.BLOCK_M * (dim + value_dim + 8) + scores * ((shared or adds_dq(genes)) + shared)
    return max(loop, 0 if genes.QUERY_SPLIT > 1 else genes.BLOCK_N * (dim + value_dim))


def pass_smem_bytes(problem: AttentionProblem, genes: BackwardMmaGenes) -> int:
    """Of a block of a launch that computes dQ by itself: Q and dO, the rings of K and V."""
    dim, value_dim = (row_bytes(padded_dim(n), genes) for n in (problem.head_dim, problem.head_dim_v))
    return (genes.PASS_M + genes.PASS_STAGES * genes.PASS_N) * (dim + value_dim)


def scratch_bytes(problem: AttentionProblem, genes: BackwardMmaGenes) -> dict[str, int]:
    """Two floats for each row of Q; the fp32 sums of dQ, and of dK and dV where blocks share their queries; a float for
    each tile of rows where sinks have a gradient; a byte for each block of a block list."""
    tiles = row_blocks(problem, genes.BLOCK_M) * problem.heads * batches(problem)
    scratch, sums = {"row_terms": 8 * tiles * genes.BLOCK_M}, sum_offsets(problem, genes)[-1]
    scratch |= {"sums": 4 * sums} if sums else {}
    if problem.blocks:
        scratch[BLOCK_STATES] = math.prod(problem.term_shapes["kv_indices"])
    return scratch | ({"sink_sums": 4 * tiles} if "sinks" in parse_grads(problem.grads) else {})


def sum_offsets(problem: AttentionProblem, genes: BackwardMmaGenes) -> tuple[int, int, int, int]:
    """Where the sums of dQ, dK and dV begin in their buffer, and where it ends, in floats."""
    dq, dk, dv = _sums(problem, genes)
    return 0, dq, dq + dk, dq + dk + dv


def _sums(problem: AttentionProblem, genes: BackwardMmaGenes) -> tuple[int, int, int]:
    """Floats of the sums of dQ, dK and dV."""
    dim, value_dim = padded_dim(problem.head_dim), padded_dim(problem.head_dim_v)
    rows = row_blocks(problem, genes.BLOCK_M) * genes.BLOCK_M * problem.heads * batches(problem)
    keys = key_blocks(problem, genes.BLOCK_N) * genes.BLOCK_N * problem.kv_heads * batches(problem)
    keys *= genes.QUERY_SPLIT > 1
    return rows * dim * adds_dq(genes), keys * dim, keys * value_dim


FIXED_REGISTERS = 58
"""Addresses, counters, bounds, fragments under way."""


def registers_needed(problem: AttentionProblem, genes: BackwardMmaGenes) -> int:
    """Estimate of the registers per thread below which ptxas spills, of the block of keys: accumulators of dK and dV,
    scores and their gradients of a part, K and V where they stay in registers; or dQ in their place."""
    tiles = genes.BLOCK_N // (16 * genes.WARPS)
    steps, value_steps = padded_dim(problem.head_dim) // 16, padded_dim(problem.head_dim_v) // 16
    gradients = 8 * sum(math.ceil(n / genes.QUERY_WARPS) for n in (steps, value_steps))
    kept = 4 * (steps * (genes.KV_PLACE == "registers") + value_steps * (genes.KV_PLACE != "shared"))
    part = genes.PART // 2 * 2 + genes.PART // 4
    if problem.softcap or problem.own_score:
        part += genes.PART // 2
    summed = registers_of(problem, tiles, genes.PART) if problem.grads else 0
    dq = 0
    if adds_dq(genes):
        columns = block_warps(genes) // genes.DQ_WARPS
        dq = genes.BLOCK_M // (16 * genes.DQ_WARPS) * 8 * math.ceil(steps / columns)
    return tiles * (gradients + kept) + max(tiles * part + summed, dq) + FIXED_REGISTERS


def pass_registers_needed(problem: AttentionProblem, genes: BackwardMmaGenes) -> int:
    """The same of the launch that computes dQ by itself."""
    tiles = genes.PASS_M // (16 * genes.PASS_WARPS)
    return tiles * (padded_dim(problem.head_dim) // 2 + genes.PASS_N) + FIXED_REGISTERS
