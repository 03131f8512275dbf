"""The genes of latent_columns, and what they take: threads, shared memory, registers, work."""

from evoattn.families.genes import Genes, gene
from evoattn.families.latent import row_blocks
from evoattn.families.residency import WARP
from evoattn.families.tensor_tiles import ELEMENT_BYTES
from evoattn.families.work import COLUMNS, LaunchWork, Step, merge_work, row_steps, tensor_bytes
from evoattn.model.problem import AttentionProblem


class LatentColumnsGenes(Genes):
    """The parameters of latent_columns."""

    BLOCK_M: int = gene("rows of a tile, query heads that share a K/V head", (16, 32))
    QUERIES: int = gene("queries that they are of: each has as many heads in a tile", (1, 2, 4))
    BLOCK_N: int = gene("keys per tile", (64,))
    STAGES: int = gene("tiles of K in shared memory", (1, 2, 3, 4, 6))
    LOADED: int = gene(
        "of a cache of 8 bits places for what is loaded, before it is converted", (1, 2, 3, 4, 6), default=1
    )
    LOAD_KEYS: int = gene("keys of such a place", (16, 32), default=16)

    @property
    def heads(self) -> int:
        """Of a query, in a tile."""
        return self.BLOCK_M // self.QUERIES


def row_tiles(problem: AttentionProblem, genes: LatentColumnsGenes) -> int:
    """Tiles of rows of a K/V head."""
    return row_blocks(problem, genes.heads, genes.QUERIES)


MERGE_THREADS = 256
"""Of a block of latent_columns_merge: two take each chunk of 512 columns, as one row may be of all blocks."""
IN_FLIGHT = 8
"""Results that each of these loads at once (`latent_columns/merge_kernel.cuh`)."""


def merged_at_once(value_dim: int) -> int:
    """Results of a row that a block adds up before it rescales what it has."""
    return IN_FLIGHT * (MERGE_THREADS * COLUMNS // value_dim)


THREADS, CONVERTING_THREADS = 160, 512
"""A warpgroup that multiplies, and a warp that copies; of a cache of 8 bits two warpgroups behind its own that convert.
"""
MAX_REGISTERS, REGISTERS_BESIDE_CONVERTERS, CONVERTING_REGISTERS, FIXED_REGISTERS = 255, 240, 128, 48
"""Per thread: the most; the most beside warps that convert, where all have as many at launch; addresses, counters and
operands beside O, scores, maxima and sums."""


def smem_bytes(problem: AttentionProblem, genes: LatentColumnsGenes) -> int:
    """Dynamic shared memory of a block (`shared_layout.cuh`): tiles of Q, the ring of K, of 8 bits what is loaded and
    its scales, P, a float of each warp for each row, barriers."""
    row_bytes, q_stages = problem.head_dim * ELEMENT_BYTES, 1 if problem.kv else 2
    tiles = (q_stages * genes.BLOCK_M + genes.STAGES * genes.BLOCK_N) * row_bytes
    loaded = genes.LOADED * (genes.LOAD_KEYS * (row_bytes - problem.head_dim_v + 16) + 16) if problem.kv else 0
    return tiles + loaded + genes.BLOCK_M * (genes.BLOCK_N * ELEMENT_BYTES + 16) + 16 * (q_stages + genes.STAGES)


def threads(problem: AttentionProblem) -> int:
    """Of a block over the keys."""
    return CONVERTING_THREADS if problem.kv else THREADS


def registers_needed(problem: AttentionProblem, genes: LatentColumnsGenes) -> int:
    """Estimate of the registers per thread of the warps that multiply."""
    floats = genes.BLOCK_M // 2  # of 64 rows of a product
    return floats * (problem.head_dim_v // 64 + 1) + genes.BLOCK_M // 2 + FIXED_REGISTERS


TILE_WAIT, ROW_WAIT, FIRST_WAIT = 900, 40, 1500
"""Clocks, estimates: of a tile's softmax, two barriers and the ends of its products, and for each row of it; of the
first loads and last stores of a tile of rows."""
PLACE_WAIT, ALONE_WAIT = 600, 600
"""Clocks of 8 bits, by 9 configs on an H200 (2026-11-29): barriers and stores of a place of what is loaded; products
and conversions that wait for one another, where there is a single tile of 16 bits."""
SCORE_OPERATIONS = 5.0
"""Lane operations per score."""
CONVERT_OPERATIONS = 3.0
"""Instructions for a number of 8 bits: half of a conversion to fp16, one to fp32, its scale, half of one to 16 bits."""
NARROW = 2.0
"""By what products of 16 columns take longer than their operations: they wait for their 64 rows from shared memory."""


def launch_work(problem: AttentionProblem, genes: LatentColumnsGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The launch over the keys, a block of which is counted for each tile of keys, as blocks share these evenly; and
    that which merges."""
    heads, keys, dim, value_dim = genes.BLOCK_M, genes.BLOCK_N, problem.head_dim, problem.head_dim_v
    loaded = keys * (dim * ELEMENT_BYTES - value_dim * bool(problem.kv))
    converted = keys * value_dim if problem.kv else 0
    in_flight = loaded * genes.LOADED * genes.LOAD_KEYS / keys if problem.kv else (genes.STAGES - 1) * keys * dim * 2.0
    rows = row_tiles(problem, genes) * problem.kv_heads * problem.batch
    mean, _, _ = row_steps(problem, 1, keys)
    tiles = max(1.0, rows * mean)
    scores, tile_bytes, row_bytes = heads * keys, keys * dim * ELEMENT_BYTES, heads * value_dim * 4.0
    share = rows / tiles  # of a tile of rows, for a tile of keys
    converting = PLACE_WAIT * keys / genes.LOAD_KEYS + ALONE_WAIT * (genes.STAGES == 1) if problem.kv else 0.0
    step = Step(
        tensor_flops=NARROW * 2.0 * scores * (dim + value_dim),
        fp32=scores * SCORE_OPERATIONS + converted * CONVERT_OPERATIONS,
        special=scores + 4.0 * heads,
        instructions=4 * (2.5 * scores / 128 * SCORE_OPERATIONS + 300)
        + share * 4 * 4.0 * heads * value_dim / 128
        + converted * CONVERT_OPERATIONS / WARP,
        shared_bytes=tile_bytes * (2 + value_dim / dim) + 3.0 * scores * ELEMENT_BYTES + (converted and 2.0 * loaded),
        loaded_bytes=loaded + share * (heads * dim * ELEMENT_BYTES + row_bytes),
        waits=TILE_WAIT + ROW_WAIT * heads + share * FIRST_WAIT + converting,
    )
    filled = problem.group_size * problem.seqlen_q / (row_tiles(problem, genes) * heads)
    common = {"stages": genes.STAGES, "filled rows": filled}
    first = LaunchWork(
        "latent_columns",
        max(2, round(tiles)),
        threads(problem),
        threads(problem) // WARP - 1,
        smem_bytes(problem, genes),
        registers or (CONVERTING_REGISTERS if problem.kv else registers_needed(problem, genes)),
        step,
        1.0,
        1,
        Step(),
        tensor="wgmma",
        schedule="balanced",
        once_waits=2.0 * FIRST_WAIT,
        in_flight_bytes=in_flight,
        read_bytes=tensor_bytes(problem, "q", "k", "v"),
        write_bytes=tensor_bytes(problem, "o"),
        sweep_bytes=tensor_bytes(problem, "k", "v"),
        sweepers=float(row_tiles(problem, genes)),
        genes=common,
    )
    shared = 2  # blocks that have a row, most often
    scratch = rows * shared * row_bytes
    return first, merge_work("latent_columns_merge", problem, shared, scratch, common, True)
