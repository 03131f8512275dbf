"""What the kernels of split_kv take: threads, shared memory, registers, work."""

from __future__ import annotations

import math

from evoattn.families.residency import WARP
from evoattn.families.split_kv.genes import SplitKvGenes
from evoattn.model.block_list import blocks_of_rows, parse_blocks
from evoattn.model.problem import AttentionProblem

MAX_WARPS = 16
FIXED_REGISTERS = {"mma": 44, "fma": 40}
"""Addresses, counters, bounds, states of the rows."""
LAST_BLOCK_REGISTERS = 88
"""Eight chunks and states under way while the splits are added up."""
MMA_ROWS, MMA_KEYS, MMA_LANES = 8, 16, 4
"""Rows, keys and lanes per key of the transposed m16n8k16."""
SPLIT_GRANULE = LIST_GRANULE = 16
"""Keys that a split is a multiple of, and a listed block."""
LEAST_STEPS = 4
"""Steps of BLOCK_N keys of a split, at least, where a sequence has fewer keys in use than there is room for: its splits
are then smaller, so that more of them have keys. Two splits of 133 keys took 1.5 times as long as one of 266."""
TMA_VECTOR, TMA_KEYS, MAX_BOX_KEYS, TMA_ROW_BYTES = 16, 8, 256, 128
"""Of the 128-byte swizzle: bytes of a chunk, keys of a period, bytes of a row of a box; and the most rows of a box."""


def warp_keys(genes: SplitKvGenes) -> int:
    return genes.BLOCK_N // genes.WARPS


def kv_bytes(problem: AttentionProblem) -> int:
    """Of an element of K and V."""
    return problem.element_of("k").bytes


def lane_vectors(problem: AttentionProblem, genes: SplitKvGenes) -> tuple[int, int]:
    """Vectors of a row of K and of a row of V that a lane holds."""
    width, head_dim = genes.VECTOR_BYTES // kv_bytes(problem), problem.head_dim
    if genes.COMPUTE == "fma":
        vectors = math.ceil(head_dim / (width * genes.DOT_LANES))
        return vectors, vectors
    k_vectors = math.ceil(head_dim / 16) * 2 if width == 2 else math.ceil(head_dim / (4 * width))
    return k_vectors, math.ceil(head_dim / (8 * width))


def _tile_words(problem: AttentionProblem, genes: SplitKvGenes) -> tuple[int, int]:
    """Registers per lane of its part of a warp's tile of K and of V."""
    words, keys = genes.VECTOR_BYTES // 4, warp_keys(genes)
    k_rows, v_rows = (keys // 8, keys // 4) if genes.COMPUTE == "mma" else 2 * (keys * genes.DOT_LANES // WARP,)
    k_vectors, v_vectors = lane_vectors(problem, genes)
    return k_rows * k_vectors * words, v_rows * v_vectors * words


def cluster_blocks(genes: SplitKvGenes) -> int:
    """Blocks per cluster."""
    return genes.SPLITS if genes.MERGE == "cluster" else 1


def smem_bytes(problem: AttentionProblem, genes: SplitKvGenes) -> int:
    """Dynamic shared memory of a block: the rings of its warps, in their place later a result of each warp in fp32; two
    mbarriers (16 bytes) for each stage of a ring that a tensor map fills; and a ticket, or, at a multiple of 16 bytes,
    four columns and a state (24 bytes) of each item that the blocks of a cluster send.
    """
    rings, barriers, stages = 0, 0, genes.WARPS * genes.STAGES
    if genes.LOAD == "cp_async":
        rings = stages * sum(_tile_words(problem, genes)) * 4 * WARP
    elif genes.LOAD == "tma":
        row_bytes = math.ceil(problem.head_dim * kv_bytes(problem) / TMA_ROW_BYTES) * TMA_ROW_BYTES
        rings, barriers = stages * 2 * warp_keys(genes) * row_bytes, stages * 16
    pitch = math.ceil(problem.head_dim / 32) * 32 * 4
    items, cluster = genes.BLOCK_M * problem.head_dim // 4, cluster_blocks(genes)
    results = max(rings, genes.WARPS * genes.BLOCK_M * (pitch + 8)) + barriers
    return (
        math.ceil(results / 16) * 16 + cluster * math.ceil(items / (4 * cluster)) * 4 * 24
        if cluster > 1
        else results + 16
    )


def tile_heads(problem: AttentionProblem) -> int:
    """Heads that have tiles of rows of their own: K/V heads, or query heads that have lists of their own."""
    return problem.heads if problem.blocks and parse_blocks(problem.blocks).by_head else problem.kv_heads


def packed_heads(problem: AttentionProblem) -> int:
    """Query heads whose rows are packed into the same tiles."""
    return problem.heads // tile_heads(problem)


def packed_rows(problem: AttentionProblem) -> int:
    """Query rows of all these."""
    return packed_heads(problem) * problem.seqlen_q


def row_blocks(problem: AttentionProblem, genes: SplitKvGenes) -> int:
    return math.ceil(packed_rows(problem) / genes.BLOCK_M)


def split_granule(problem: AttentionProblem, genes: SplitKvGenes) -> int:
    """Keys that a split is a multiple of; with pages those of a warp's tile, which must not cross a border."""
    return max(SPLIT_GRANULE, warp_keys(genes)) if problem.page else SPLIT_GRANULE


def split_span(problem: AttentionProblem, genes: SplitKvGenes) -> int:
    """The most keys that the rows of a block see together: all of them but under a window, which with pages begins at a
    granule."""
    if problem.blocks:  # in the blocks that a list names
        return listed_keys(problem)[1]
    past, ahead = problem.masking.past, problem.masking.ahead
    if past is None or ahead is None:
        return problem.seqlen_k
    queries = min(problem.seqlen_q, math.ceil((genes.BLOCK_M - 1) / problem.group_size) + 1)
    before = split_granule(problem, genes) - 1 if problem.page else 0
    return min(problem.seqlen_k, past + ahead + queries + before)


def listed_keys(problem: AttentionProblem) -> tuple[float, int]:
    """(mean, most) keys in the blocks that the list of a head names."""
    (mean, most), keys = blocks_of_rows(*problem.block_mask), parse_blocks(problem.blocks).keys
    return mean * keys, max(1, most) * keys


def split_of(problem: AttentionProblem, genes: SplitKvGenes) -> tuple[int, int]:
    """(splits, keys per split): SPLITS or fewer, each a multiple of `split_granule` keys and none of them empty, but in
    a cluster, which is compiled for so many blocks, and in sequences that are shorter than the longest.
    """
    span, granule = split_span(problem, genes), split_granule(problem, genes)
    keys = math.ceil(math.ceil(span / genes.SPLITS) / granule) * granule
    return max(cluster_blocks(genes), math.ceil(span / keys)), keys


def used_by_split(problem: AttentionProblem, genes: SplitKvGenes) -> tuple[float, int]:
    """(mean, most) keys of a split of sequences with keys in use of their own and no window: all splits of a sequence
    share its keys, in whole steps and LEAST_STEPS at least, but no split has more than `split_of` says."""
    (splits, all_keys), step = split_of(problem, genes), genes.BLOCK_N
    lengths = problem.key_lengths
    shares = (max(LEAST_STEPS, math.ceil(math.ceil(n / splits) / step)) * step for n in lengths)
    most = max(min(n, all_keys, share) for n, share in zip(lengths, shares, strict=True))
    return sum(lengths) / len(lengths) / splits, max(1, most)


def registers_needed(problem: AttentionProblem, genes: SplitKvGenes) -> int:
    """Estimate of the registers per thread below which ptxas spills: O, Q, scores, and the tiles of K and V if they are
    loaded ahead."""
    k_words, v_words = _tile_words(problem, genes)
    k_vectors, v_vectors = lane_vectors(problem, genes)
    if genes.COMPUTE == "mma":
        words, row_tiles = genes.VECTOR_BYTES // 2 // kv_bytes(problem), genes.BLOCK_M // MMA_ROWS
        rows = row_tiles * (4 * v_vectors * words + k_vectors * words + warp_keys(genes) // 4 + 6)
    else:
        width = genes.VECTOR_BYTES // kv_bytes(problem)
        rows = genes.BLOCK_M * (2 * k_vectors * width + warp_keys(genes) * genes.DOT_LANES // WARP + 2)
    if genes.LOAD == "registers":
        tiles = k_words + v_words
    else:  # mma takes its operands out of the ring one by one, the CUDA cores a tile at once
        tiles = max(k_words, v_words) // (2 if genes.COMPUTE == "mma" else 1)
    return max(
        rows + tiles + FIXED_REGISTERS[genes.COMPUTE], LAST_BLOCK_REGISTERS if genes.MERGE == "last_block" else 0
    )
