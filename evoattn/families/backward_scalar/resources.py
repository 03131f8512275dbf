"""What the kernels of backward_scalar take: shared memory, registers, scratch."""

from __future__ import annotations

import math

from evoattn.families.backward_scalar.genes import BackwardScalarGenes
from evoattn.model.problem import AttentionProblem

EACH = 4
"""Rows of a product that a thread has."""
PADDING = 4
"""Floats after each row in shared memory."""
FIXED_REGISTERS = 48
"""Addresses, bounds and operands beside the sums."""


def columns_each(genes: BackwardScalarGenes, rows: int, columns: int) -> int:
    """Columns of a product that a thread has."""
    return math.ceil(columns / (genes.THREADS * EACH // rows))


def smem_bytes(problem: AttentionProblem, genes: BackwardScalarGenes) -> int:
    """Of a block: tiles of Q, K, V and dO, P and dS, terms of the queries; all are floats."""
    m, n = genes.BLOCK_M, genes.BLOCK_N
    rows = (m + n) * (problem.head_dim + problem.head_dim_v + 2 * PADDING)
    return 4 * (rows + 2 * max(m * (n + PADDING), n * (m + PADDING)) + 2 * m)


def estimated_registers(problem: AttentionProblem, genes: BackwardScalarGenes) -> int:
    """Per thread of the launch for keys: dK, dV, S and dP."""
    m, n = genes.BLOCK_M, genes.BLOCK_N
    sums = columns_each(genes, n, problem.head_dim) + columns_each(genes, n, problem.head_dim_v)
    sums = max(sums, columns_each(genes, m, problem.head_dim)) + 2 * columns_each(genes, m, n)
    return FIXED_REGISTERS + EACH * sums


def scratch(problem: AttentionProblem) -> dict[str, int]:
    """What each query subtracts from dP, fp32."""
    return {"deltas": 4 * math.prod(problem.lse_shape)}
