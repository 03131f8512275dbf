"""The genes of split_kv, and what they take: threads, shared memory, registers, scratch, work."""

import math
from functools import lru_cache
from typing import Literal

from evoattn.families.genes import SINCE_HOPPER, Genes, gene
from evoattn.families.residency import WARP, register_cap
from evoattn.families.work import (
    CONVERSION,
    LAST_BLOCK_WAIT,
    LaunchWork,
    Step,
    bias_bytes,
    merge_work,
    tensor_bytes,
    together,
    up_to,
    variant_step,
)
from evoattn.model.block_list import blocks_of_rows, parse_blocks
from evoattn.model.mask import MaskKind
from evoattn.model.problem import AttentionProblem
from evoattn.model.symbol import as_one


class SplitKvGenes(Genes):
    """The parameters of split_kv."""

    COMPUTE: Literal["mma", "fma"] = gene("tensor cores (16-bit types, rows in multiples of eight), or CUDA cores")
    LOAD: Literal["registers", "cp_async", "tma"] = gene(
        "K and V are loaded into registers one tile ahead (registers), or into a ring in shared memory, by each "
        "lane for itself (cp_async) or by the tensor copy engine, one tile at a time (tma, sm_90)",
        only={"tma": SINCE_HOPPER},
    )
    BLOCK_M: int = gene(
        "query rows per block: queries times the heads that share a K/V head", (1, 2, 4, 8, 16, 24, 32, 64)
    )
    BLOCK_N: int = gene("keys that the warps of a block take at a time", (16, 32, 64, 128, 256, 512, 1024))
    WARPS: int = gene("warps that share these keys, each with an online softmax of its own", (1, 2, 4, 8, 16))
    STAGES: int = gene("tiles of K and of V in flight per warp", (1, 2, 3, 4, 6, 8))
    VECTOR_BYTES: int = gene("bytes per load of K, V and Q", (4, 8, 16))
    DOT_LANES: int = gene("lanes that share a key (4 with mma)", (1, 2, 4, 8, 16, 32))
    SPLITS: int = gene(
        "blocks that split the keys of the same rows; fewer where there are few keys",
        (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    )
    MERGE: Literal["kernel", "last_block", "cluster"] = gene(
        "the results of the splits are added up by a second kernel (kernel), by the block that finishes last "
        "(last_block), or by the blocks of a cluster in their shared memory (cluster, sm_90)"
    )
    DEPENDENT_LAUNCH: Literal["none", "early", "late"] = gene(
        "when the second kernel begins: after the first has ended (none); before that, once all blocks of the "
        "first have begun (early) or have been through their keys (late); it then waits for their results",
        only={"early": SINCE_HOPPER, "late": SINCE_HOPPER},
    )
    BLOCKS_PER_SM: int = gene("blocks that registers and shared memory leave room for on one SM", (1, 2, 3, 4, 6, 8))


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
    four columns and a state (24 bytes) of each item that the blocks of a cluster send."""
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


@as_one
def split_of(problem: AttentionProblem, genes: SplitKvGenes) -> tuple[int, int]:
    """(splits, keys per split): SPLITS or fewer, each a multiple of `split_granule` keys and none of them empty, but in
    a cluster, which is compiled for so many blocks, and in sequences that are shorter than the longest."""
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


MMA_WAIT, SHUFFLE_WAIT, LOAD_WAIT, FIRST_WAIT = 18, 24, 30, 900
PLACE_LANES = 4.5
"""Lanes that find the place of a score, where a score has one: counted by the interpreter."""
CLUSTER_WAIT = 1500
"""Clocks until the sums of the other blocks are there, through a cluster's shared memory."""


def launch_work(problem: AttentionProblem, genes: SplitKvGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The launch over keys, and the one that merges the splits if there is one."""
    (splits, split_keys), row_tiles = split_of(problem, genes), row_blocks(problem, genes)
    heads = tile_heads(problem) * problem.batch
    rows, keys, dim, size = genes.BLOCK_M, genes.BLOCK_N, problem.head_dim, kv_bytes(problem)
    if (problem.seqused or problem.page) and not problem.window:
        mean, most = used_by_split(problem, genes)
        visible = min(1.0, mean / most)
    elif problem.blocks:
        (mean, all_keys), most = listed_keys(problem), split_keys
        visible = min(1.0, mean / all_keys)
    else:
        most, visible = min(split_keys, problem.seqlen_k), _visible_share(problem, row_tiles)
    steps = math.ceil(most / keys)
    step, waits = _step(problem, genes)
    step = together(step, variant_step(problem, rows * keys, PLACE_LANES, packs=False))
    merged = rows * (up_to(dim, 32) * 4 + 8)
    ends = Step(
        fp32=rows * dim * genes.WARPS * 2.0,
        special=rows * genes.WARPS * 2.0,
        instructions=3.0 * rows * dim * genes.WARPS / WARP + 60 * genes.WARPS,
        shared_bytes=2.0 * merged * genes.WARPS,
        loaded_bytes=rows * dim * problem.element_bytes * 1.0
        + (rows * dim * 4 * (2 if genes.MERGE == "last_block" else 1)),
        waits=FIRST_WAIT + waits,
    )
    if splits > 1 and genes.MERGE != "kernel":
        ends = Step(
            ends.tensor_flops,
            ends.fp32,
            ends.special,
            ends.instructions * 1.3,
            ends.shared_bytes * 1.3,
            ends.loaded_bytes,
            ends.waits + (CLUSTER_WAIT if genes.MERGE == "cluster" else LAST_BLOCK_WAIT),
        )
    in_flight = {"registers": 1.0, "cp_async": genes.STAGES, "tma": genes.STAGES}[genes.LOAD] * 2 * keys * dim * size
    scratch = heads * row_tiles * splits * rows * (dim * 4 + 8) if splits > 1 and genes.MERGE != "cluster" else 0
    common = {
        "merge": ("kernel", "last_block", "cluster").index(genes.MERGE) if splits > 1 else -1,
        "dependent": ("none", "early", "late").index(genes.DEPENDENT_LAUNCH) if splits > 1 else 0,
    }
    partial = LaunchWork(
        "split_kv",
        row_tiles * splits * heads,
        WARP * genes.WARPS,
        genes.WARPS,
        smem_bytes(problem, genes),
        registers or min(registers_needed(problem, genes), register_cap(genes.WARPS, genes.BLOCKS_PER_SM)),
        step,
        steps * visible,
        steps,
        ends,
        in_flight_bytes=in_flight,
        read_bytes=tensor_bytes(problem, "q", "k", "v") + bias_bytes(problem),
        write_bytes=scratch or tensor_bytes(problem, "o"),
        sweep_bytes=tensor_bytes(problem, "k", "v"),
        sweepers=float(row_tiles),
        cluster=cluster_blocks(genes),
        genes={
            **common,
            "by mma": genes.COMPUTE == "mma",
            "load": ("registers", "cp_async", "tma").index(genes.LOAD),
            "stages": genes.STAGES,
            "vector bytes": genes.VECTOR_BYTES,
            "dot lanes": genes.DOT_LANES,
            "warp keys": warp_keys(genes),
            "splits": splits,
            "idle warps": max(0.0, 1 - most / keys / max(steps, 1)),
            "filled rows": packed_rows(problem) / (row_tiles * rows),
            "asked blocks": genes.BLOCKS_PER_SM,
        },
    )
    if splits == 1 or genes.MERGE != "kernel":
        return (partial,)
    overlaps = genes.DEPENDENT_LAUNCH != "none"
    return partial, merge_work("split_kv_merge", problem, splits, float(scratch), common, overlaps)


@lru_cache(maxsize=256)  # configs of one problem have few numbers of row tiles
def _visible_share(problem: AttentionProblem, row_tiles: int) -> float:
    """The part of all keys that the blocks visit, on average."""
    full = problem.masking.kind is MaskKind.FULL
    if full and not (problem.seqused or problem.varlen):
        return 1.0
    pairs = problem.visible_pairs / (problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k)
    if full:
        return pairs
    return min(1.0, pairs + 0.5 / row_tiles)


def _step(problem: AttentionProblem, genes: SplitKvGenes) -> tuple[Step, float]:
    """A step of all warps of a block, and what a warp waits for at the end."""
    rows, keys, dim, size = genes.BLOCK_M, genes.BLOCK_N, problem.head_dim, kv_bytes(problem)
    scores = rows * keys
    loaded = 2.0 * keys * dim * size
    shared = 0.0 if genes.LOAD == "registers" else 2 * loaded
    load_instructions = loaded / (WARP * genes.VECTOR_BYTES) * (1.5 if genes.LOAD == "registers" else 2.5)
    if genes.LOAD == "tma":
        load_instructions = loaded / (WARP * genes.VECTOR_BYTES)
    if size == 1:  # each pair is converted
        load_instructions += 2.0 * keys * dim / WARP / 2 * CONVERSION
    if genes.COMPUTE == "mma":
        padded = up_to(rows, 8)
        flops = 4.0 * padded * keys * up_to(dim, 16)
        lanes = padded * keys * 4.0 + padded * dim * genes.WARPS
        issued = flops / 4096 + (lanes + padded * keys) / WARP + load_instructions + keys * dim / WARP / 4 * 2
        waits = (dim / 16 * 0.5 + 2) * MMA_WAIT + 6 * SHUFFLE_WAIT + LOAD_WAIT
        return Step(flops, lanes, padded * keys, issued, shared, loaded, waits), 5 * SHUFFLE_WAIT
    widened = 1.0 if size == 4 else 1.0 + 1.0 / rows
    steps_of_sum = math.log2(genes.DOT_LANES) if genes.DOT_LANES > 1 else 0.0
    shuffles = rows * keys * genes.DOT_LANES / WARP * steps_of_sum
    vectors = sum(lane_vectors(problem, genes))
    lanes = 2.0 * scores * dim * widened + scores * genes.DOT_LANES * 4
    lanes += rows * dim * genes.WARPS * WARP / genes.DOT_LANES
    issued = lanes / WARP + shuffles * 2 + scores * genes.DOT_LANES / WARP + load_instructions
    waits = steps_of_sum * SHUFFLE_WAIT * rows**0.5 + LOAD_WAIT + 4.0 * vectors + 60
    exponentials = scores * genes.DOT_LANES
    return Step(0.0, lanes, exponentials, issued, shared, loaded, waits), (5 - steps_of_sum) * rows * SHUFFLE_WAIT / 4
