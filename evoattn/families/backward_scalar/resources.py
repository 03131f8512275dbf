"""The genes of backward_scalar, and what they take: threads, shared memory, registers, scratch, work."""

import math

from evoattn.families.genes import Genes, gene
from evoattn.families.residency import WARP, register_cap
from evoattn.families.work import LaunchWork, Step, row_steps, tensor_bytes, together, variant_step
from evoattn.model.backward import parse_grads
from evoattn.model.problem import AttentionProblem


class BackwardScalarGenes(Genes):
    """The parameters of backward_scalar."""

    BLOCK_M: int = gene("queries per tile", (16, 32, 64))
    BLOCK_N: int = gene("keys per tile", (16, 32, 64))
    THREADS: int = gene("threads of a block", (64, 128, 256))
    BLOCKS_PER_SM: int = gene("blocks that the registers leave room for on one SM", (1, 2, 3, 4))


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


STEP_WAIT, FIRST_WAIT, ROW_WAIT = 1500, 2000, 1000
"""Clocks: of a tile's loads and four barriers, which nothing hides; of a block's first loads and last stores; of a
block of the launch for rows. Estimates: nothing was fitted yet."""
PAIR_OPERATIONS = 14
"""FP32 operations for each pair beside the products: mask, exponent, differences."""


def launch_work(problem: AttentionProblem, genes: BackwardScalarGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The deltas, the launch for keys, the launch for queries."""
    per_query, most, tiles = row_steps(problem, genes.BLOCK_M, genes.BLOCK_N)
    sequences = 1 if problem.varlen else problem.batch
    query_blocks = tiles * problem.heads * sequences
    pairs = per_query * query_blocks  # of tiles
    key_tiles = math.ceil(problem.seqlen_k / genes.BLOCK_N)
    key_blocks = key_tiles * problem.kv_heads * problem.batch
    bias = problem.term_shapes["bias"] if "bias" in parse_grads(problem.grads) else None
    of_bias = tiles * bias[0] * bias[1] if bias else query_blocks
    query_tiles = math.ceil(problem.seqlen_q / genes.BLOCK_M) * problem.group_size
    rows = math.prod(problem.lse_shape)
    warps = genes.THREADS // WARP
    deltas = LaunchWork(
        "backward_scalar_terms",
        max(1, math.ceil(rows / warps)),
        genes.THREADS,
        warps,
        0,
        32,
        Step(),
        1.0,
        1.0,
        Step(
            fp32=2.0 * warps * problem.head_dim_v,
            instructions=warps * (problem.head_dim_v / WARP * 4 + 30),
            loaded_bytes=2.0 * warps * problem.head_dim_v * problem.element_bytes,
            waits=ROW_WAIT,
        ),
        read_bytes=2 * tensor_bytes(problem, "o"),
        write_bytes=4.0 * rows,
    )
    keys = _main(problem, genes, registers, "keys", key_blocks, pairs / key_blocks, float(query_tiles))
    queries = _main(problem, genes, registers, "queries", of_bias, pairs / of_bias, max(float(most), pairs / of_bias))
    return deltas, keys, queries


def _main(
    problem: AttentionProblem,
    genes: BackwardScalarGenes,
    registers: int,
    what: str,
    blocks: int,
    steps: float,
    most: float,
) -> LaunchWork:
    """The launch for keys or for queries."""
    m, n, dim, value_dim, size = genes.BLOCK_M, genes.BLOCK_N, problem.head_dim, problem.head_dim_v, 4
    pairs, by_keys, warps = m * n, what == "keys", genes.THREADS // WARP
    loaded, kept = (m, n) if by_keys else (n, m)
    depth = 2 * dim + value_dim + (value_dim if by_keys else 0)  # of the products of a pair
    lane_columns = max(1, genes.THREADS * EACH // m)
    reads = pairs * (dim + value_dim) * size * (1 / EACH + 1 / max(1, n // lane_columns)) / 4
    reads += pairs * (depth - dim - value_dim) * size / EACH
    elements = loaded * (dim + value_dim)
    step = Step(
        fp32=pairs * (depth + PAIR_OPERATIONS),
        special=float(pairs),
        instructions=pairs * (depth * 1.4 + 2 * PAIR_OPERATIONS) / WARP + 6.0 * elements / WARP,
        shared_bytes=reads * 2 + elements * size + 4.0 * pairs * size,
        loaded_bytes=float(elements * problem.element_bytes),
        waits=STEP_WAIT,
    )
    ends = Step(
        instructions=8.0 * kept * (dim + value_dim) / WARP,
        shared_bytes=float(kept * (dim + value_dim) * size),
        loaded_bytes=2.0 * kept * (dim + value_dim) * problem.element_bytes,
        waits=FIRST_WAIT,
    )
    swept, own = (("q", "o"), ("k", "v")) if by_keys else (("k", "v"), ("q", "o"))
    return LaunchWork(
        f"backward_scalar_{what}",
        blocks,
        genes.THREADS,
        warps,
        smem_bytes(problem, genes),
        registers or min(estimated_registers(problem, genes), register_cap(warps, genes.BLOCKS_PER_SM)),
        together(step, variant_step(problem, pairs)),
        steps,
        max(most, steps),
        ends,
        read_bytes=tensor_bytes(problem, "q", "k", "v", "o"),
        write_bytes=tensor_bytes(problem, *(own if by_keys else "q")),
        sweep_bytes=tensor_bytes(problem, *swept),
        sweepers=float(max(1, blocks // max(1, problem.kv_heads * problem.batch))),
        visits=float(max(1, blocks // max(1, problem.kv_heads * problem.batch))),
        genes={"by keys": by_keys, "asked blocks": genes.BLOCKS_PER_SM},
    )
