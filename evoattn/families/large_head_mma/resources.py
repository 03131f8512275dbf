"""The genes of large_head_mma, and what they take: threads, shared memory, registers, work."""

import math
from typing import Literal

from evoattn.families.genes import Genes, gene
from evoattn.families.residency import WARP, register_cap
from evoattn.families.tensor_tiles import ELEMENT_BYTES
from evoattn.families.work import LaunchWork, Step, row_steps, tensor_bytes, visit_share
from evoattn.model.problem import AttentionProblem


class LargeHeadMmaGenes(Genes):
    """The parameters of large_head_mma."""

    BLOCK_M: int = gene("query rows per block", (16, 32, 48, 64, 96, 128))
    BLOCK_N: int = gene("keys per tile", (16, 32, 48, 64, 96, 128, 192))
    DV_SPLIT: int = gene("blocks that share the columns of O, where O does not fit the registers of one", (1, 2, 4, 8))
    SCORES: Literal["recompute", "cluster"] = gene(
        "each of these blocks computes all scores (recompute), or multiplies its own columns of Q and K and reads "
        "the others' sums from the shared memory of their cluster (cluster, sm_90)"
    )
    ROW_WARPS: int = gene("warps that share the rows of a block", (1, 2, 3, 4, 8))
    COLUMN_WARPS: int = gene(
        "warps that share the same rows: each has a part of the keys, then of the columns of O", (1, 2, 4, 8)
    )
    DIM_CHUNK: int = gene("columns of K per copy", (32, 64, 128, 256))
    KEY_CHUNK: int = gene("rows of V per copy", (16, 32, 64))
    STAGES: int = gene(
        "chunks of K and V in shared memory: one is read, the others are being copied", (2, 3, 4, 5, 6, 8)
    )
    Q_PLACE: Literal["shared", "streamed"] = gene("Q stays in shared memory, or is copied again with every chunk of K")
    SMEM_LAYOUT: Literal["swizzled", "padded"] = gene(
        "how rows lie in shared memory without bank conflicts: 16-byte chunks permuted by exclusive-or, or one "
        "chunk of padding per row"
    )
    RESCALE: Literal["always", "vote", "lazy"] = gene(
        "the output is rescaled for every tile (always), if a row maximum of the warp grew (vote), or if one "
        "exceeded a shift set five powers of two above an earlier maximum (lazy)"
    )
    BLOCK_ORDER: Literal["rows", "rows_reversed", "heads", "heads_reversed"] = gene(
        "neighbouring blocks take the row blocks of one head (rows) or one row block of all heads (heads); "
        "reversed: last row blocks first, which are the longest under a causal mask"
    )
    BLOCKS_PER_SM: int = gene("blocks that registers and shared memory leave room for on one SM", (1, 2, 3))


CHUNK = 8
"""Elements of 16 bytes, which one lane copies at a time."""
FIXED_REGISTERS = 40
"""Addresses, counters, bounds, fragments of K and V under way."""
ROW_TILE_REGISTERS = 16
"""Shifts, sums and the fragment of Q or P of one tile of 16 rows."""
WIDE_CHUNK, WIDE_CHUNK_REGISTERS = 128, 12
"""What ptxas loads ahead for one tile of 16 rows from a DIM_CHUNK of this width on."""


def block_warps(genes: LargeHeadMmaGenes) -> int:
    return genes.ROW_WARPS * genes.COLUMN_WARPS


def slice_elements(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """Columns of O that one block has."""
    return problem.head_dim // genes.DV_SPLIT


def in_cluster(genes: LargeHeadMmaGenes) -> bool:
    return genes.SCORES == "cluster"


def dim_blocks(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """Blocks of 16 columns of O that one warp has."""
    return math.ceil(slice_elements(problem, genes) / (16 * genes.COLUMN_WARPS))


def _row_bytes(genes: LargeHeadMmaGenes, elements: int) -> int:
    """Bytes of a row of `elements` in shared memory, with a padding chunk if it is not swizzled."""
    return ELEMENT_BYTES * (elements + (CHUNK if genes.SMEM_LAYOUT == "padded" else 0))


def dim_steps(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """Chunks that a tile of K comes in: of all columns, or of the block's slice."""
    return math.ceil((slice_elements(problem, genes) if in_cluster(genes) else problem.head_dim) / genes.DIM_CHUNK)


def stage_bytes(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """One place of the ring: a chunk of K, with one of Q if that is streamed, or a chunk of V."""
    rows = genes.BLOCK_N + (genes.BLOCK_M if genes.Q_PLACE == "streamed" else 0)
    v_columns = 16 * genes.COLUMN_WARPS * dim_blocks(problem, genes)
    return max(rows * _row_bytes(genes, genes.DIM_CHUNK), genes.KEY_CHUNK * _row_bytes(genes, v_columns))


def q_bytes(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """Q of a block, in chunks as wide as those of K."""
    if genes.Q_PLACE == "streamed":
        return 0
    return dim_steps(problem, genes) * genes.BLOCK_M * _row_bytes(genes, genes.DIM_CHUNK)


def smem_bytes(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """Dynamic shared memory of a block: the ring, Q, P, two tiles of partial scores in a cluster, and a float for each
    row and column warp if there are several of these."""
    block_m, column_warps = genes.BLOCK_M, genes.COLUMN_WARPS
    p = genes.BLOCK_N // genes.KEY_CHUNK * block_m * _row_bytes(genes, genes.KEY_CHUNK)
    partials = 2 * 4 * block_m * genes.BLOCK_N if in_cluster(genes) else 0
    rows = 4 * block_m * column_warps if column_warps > 1 else 0
    return genes.STAGES * stage_bytes(problem, genes) + q_bytes(problem, genes) + p + partials + rows


def registers_needed(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> int:
    """Estimate of the registers per thread below which ptxas spills: the accumulators of O and S beside what a tile of
    16 rows needs.

    Fitted to NVRTC 13.0 on sm_89 and sm_90a."""
    row_tiles = genes.BLOCK_M // (16 * genes.ROW_WARPS)
    accumulators = 8 * dim_blocks(problem, genes) + genes.BLOCK_N // genes.COLUMN_WARPS // 2
    ahead = WIDE_CHUNK_REGISTERS if genes.DIM_CHUNK >= WIDE_CHUNK else 0
    return row_tiles * (accumulators + ROW_TILE_REGISTERS + ahead) + FIXED_REGISTERS


MMA_WAIT, LDMATRIX_WAIT, SHUFFLE_WAIT, BARRIER_WAIT, CLUSTER_WAIT, FIRST_WAIT = 18, 24, 24, 40, 700, 1000


def launch_work(problem: AttentionProblem, genes: LargeHeadMmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The one launch: a block has a slice of the columns of O, and all scores or, in a cluster, its share of them."""
    rows, keys = genes.BLOCK_M, genes.BLOCK_N
    warps, scores = block_warps(genes), genes.BLOCK_M * genes.BLOCK_N
    qk_dim = dim_steps(problem, genes) * genes.DIM_CHUNK
    v_dim = dim_blocks(problem, genes) * 16 * genes.COLUMN_WARPS
    own = slice_elements(problem, genes)
    flops = 2.0 * scores * (qk_dim + v_dim)
    size = problem.element_bytes
    q_reads = rows * qk_dim * size * genes.COLUMN_WARPS
    reads = genes.ROW_WARPS * keys * (qk_dim + v_dim) * size + q_reads + rows * keys * size * genes.COLUMN_WARPS
    k_columns = own if in_cluster(genes) else problem.head_dim
    copied = keys * (k_columns + own) * size + (rows * k_columns * size if genes.Q_PLACE == "streamed" else 0.0)
    exchanged = scores * 4.0 * (genes.DV_SPLIT + 1) if in_cluster(genes) else 0.0
    shared = reads + copied + scores * size + exchanged
    rescale = rows * own * {"always": 1.0, "vote": 0.3, "lazy": 0.02}[genes.RESCALE]
    lanes = scores * 4.5 + rescale
    issued = 2 * flops / 4096 + lanes / WARP + scores / WARP + 3 * reads / 512 + 5 * copied / 512 + exchanged / 512
    chunks = dim_steps(problem, genes) + keys // genes.KEY_CHUNK
    waits = chunks * (BARRIER_WAIT + LDMATRIX_WAIT + MMA_WAIT * 2) + 2 * SHUFFLE_WAIT + 60
    waits += (60 if genes.COLUMN_WARPS > 1 else 0) + (CLUSTER_WAIT if in_cluster(genes) else 0)
    mean, most, count = row_steps(problem, rows, keys)
    order = genes.BLOCK_ORDER
    return (
        LaunchWork(
            "large_head_mma",
            count * problem.heads * problem.batch * genes.DV_SPLIT,
            WARP * warps,
            warps,
            smem_bytes(problem, genes),
            registers or min(registers_needed(problem, genes), register_cap(warps, genes.BLOCKS_PER_SM)),
            Step(flops, lanes, scores + rescale / 32, issued, shared, copied, waits),
            mean,
            most,
            Step(
                instructions=rows * own / WARP + 60 * warps,
                loaded_bytes=rows * (problem.head_dim + own) * size,
                waits=FIRST_WAIT,
            ),
            longest_first=problem.causal and order == "heads_reversed",
            in_flight_bytes=float((genes.STAGES - 1) * stage_bytes(problem, genes)),
            read_bytes=tensor_bytes(problem, "q", "k", "v"),
            write_bytes=tensor_bytes(problem, "o"),
            sweep_bytes=tensor_bytes(problem, "k", "v"),
            sweepers=float(count * problem.group_size * genes.DV_SPLIT),
            visits=float(count),
            visit_share=visit_share(problem, mean, keys),
            heads_in_turn=problem.kv_heads * problem.batch if order.startswith("heads") else 1.0,
            cluster=genes.DV_SPLIT if in_cluster(genes) else 1,
            genes={
                "rows per warp": rows / genes.ROW_WARPS,
                "column warps": genes.COLUMN_WARPS,
                "dim split": genes.DV_SPLIT,
                "scores once": genes.SCORES == "cluster",
                "stages": genes.STAGES,
                "barriers": chunks,
                "q registers": genes.Q_PLACE == "streamed",
                "padded": genes.SMEM_LAYOUT == "padded",
                "rescale": ("always", "vote", "lazy").index(genes.RESCALE),
                "heads first": order.startswith("heads"),
                "reversed": order.endswith("reversed"),
                "dim chunk": genes.DIM_CHUNK,
                "key chunk": genes.KEY_CHUNK,
            },
        ),
    )
