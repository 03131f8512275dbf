"""How much a kernel has to do on a problem, in the terms of which its time is made: launches, waves, steps, bytes.

One step is a tile of keys against a tile of query rows. A kernel's time is the sum of these terms, each times a
constant of the kernel that was fitted to its measured times; the constants are never negative, so that more work
never counts as less time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from evoattn.families.flash_wgmma.genes import FlashWgmmaGenes
from evoattn.families.flash_wgmma.resources import merges_in_memory
from evoattn.families.row_blocks import batches
from evoattn.families.tensor_tiles import group_slots
from evoattn.families.work import row_steps
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.model.variant import parse_window

LATENT = "latent_wgmma"
PACKED = ("split_kv", "large_head", LATENT)
"""Families whose tiles always stack the query heads of one K/V head."""
SPLIT_KEYS = 16
"""Keys that a split of split_kv is a multiple of; those of latent_wgmma are whole tiles."""
USUAL_TILE = 8192
"""Scores of a tile that counts as one where the work in a step is counted, so that kernels have like constants."""
PARTIAL_BYTES, STATE_VALUES = 4, 2
"""Of a split's result: fp32, and the maximum and the sum of each row beside it."""
GPCS = (18, 18, 18, 16, 16, 16, 16, 14)
"""SMs of the processing clusters of an H200, within one of which a cluster of blocks lies. Of four blocks 31 clusters
fit at one block per SM and 62 at two, as times of KEY_SPLIT=4 show: 120 blocks take one wave and 128 two, and at two
blocks per SM 248 and 256. Of other cards the same parts are taken. By times of later campaigns 30 fit, which the cost
model counts (`evoattn/cost/launch_time.py`); here they stay 31 as long as constants of the classes are fitted so."""
L2_SHARE = 0.8
"""Of the L2 cache, beyond which bytes are taken to come from DRAM."""


class Work(NamedTuple):
    """Terms of a time. `launch` is one; the others are counts or, of bytes, µs at the bandwidth of the data sheet."""

    launch: float
    waves: float
    """Waves of blocks."""
    longest: float
    """Steps of the SM that has most, one block after another."""
    shared: float
    """The same, each step counted once for every block that runs beside it on its SM, and by the size of its tile."""
    dram: float
    """Bytes of Q, K, V and O beyond what stays in L2."""
    steps: float
    """All steps over the number of SMs, by the size of their tiles."""
    bytes: float
    merge: float
    """One where the results of several splits are merged, else none."""
    splits: float
    """Splits of a row whose results are merged, one after another."""
    partial: float
    """Bytes of the results that are merged."""
    out: float
    """Bytes of O."""
    read: float
    """Bytes of K and V as the blocks read them, most of them from L2."""
    apart: float
    """Those of `dram` where rows lie apart in memory, as heads are beside one another (`bshd`)."""
    merging: float
    """Rows that a launch of its own merges, over the number of SMs."""


@dataclass(frozen=True)
class Tiles:
    """A kernel's blocks on a problem: how many, their steps on average and at most, whether blocks take several tiles,
    and how many splits of the keys another launch or block merges."""

    blocks: int
    mean: float
    longest: int
    schedule: str = "single"
    splits: int = 1
    cluster: int = 1
    """Blocks that start together."""
    partial_rows: int = 0
    """Rows of results that splits leave in memory."""


def _row_steps(problem: AttentionProblem, block_m: int, block_n: int) -> tuple[float, int, int]:
    """(mean, most, count): steps of the row blocks of one head, of all sequences if they are packed, of a sequence with
    as many keys in use as there are in the mean."""
    if problem.varlen:
        return row_steps(problem, block_m, block_n)
    if problem.seqused:
        used = max(1, round(sum(problem.key_lengths) / problem.batch))
        problem = problem.with_(seqlen_k=used, seqused="", page=0)
    count = math.ceil(problem.seqlen_q / block_m)
    if problem.window:
        lowest, highest = problem.masking.edges(problem.seqlen_q, problem.seqlen_k)
        before = problem.seqlen_q if lowest is None else -lowest  # keys in front of a row's own, and behind it
        behind = block_m + (problem.seqlen_k if highest is None else highest)
        seen = [
            (max(0, first - before), min(problem.seqlen_k, first + behind))
            for first in range(0, problem.seqlen_q, block_m)
        ]
        steps_of = [math.ceil(end / block_n) - begin // block_n if end > begin else 1 for begin, end in seen]
        return sum(steps_of) / count, max(steps_of), count
    if not problem.causal:
        all_keys = math.ceil(problem.seqlen_k / block_n)
        return all_keys, all_keys, count
    offset = problem.causal_offset
    steps_of = [
        math.ceil(min(max(min((i + 1) * block_m, problem.seqlen_q) + offset, 1), problem.seqlen_k) / block_n)
        for i in range(count)
    ]
    return sum(steps_of) / count, max(steps_of), count


def _keys_of_block(problem: AttentionProblem, block_m: int) -> int:
    """The most keys that a block of stacked rows reads: all of them but under a window."""
    if not problem.window:
        return problem.seqlen_k
    queries = min(problem.seqlen_q, math.ceil((block_m - 1) / problem.group_size) + 1)
    return min(problem.seqlen_k, sum(parse_window(problem.window)) + queries)


def tiles_of(family: str, params: dict[str, Any], problem: AttentionProblem) -> Tiles:
    """The blocks of a config on a problem."""
    block_m, block_n, heads = params["BLOCK_M"], params["BLOCK_N"], batches(problem) * problem.heads
    if family in PACKED:
        rows: float = math.ceil(problem.group_size * problem.seqlen_q / block_m)
        if family == LATENT:  # the rows of a tile are heads of one query
            rows = problem.seqlen_q * math.ceil(problem.group_size / block_m)
        seen = _keys_of_block(problem, block_m)
        splits, keys = params.get("DIM_SPLIT", 1), seen
        if "SPLITS" in params:
            granule = block_n if family == LATENT else SPLIT_KEYS
            keys = math.ceil(math.ceil(seen / params["SPLITS"]) / granule) * granule
            splits = params["SPLITS"] if params.get("MERGE") == "cluster" else math.ceil(seen / keys)
        steps, busy = math.ceil(min(keys, seen) / block_n), splits
        if problem.varlen:
            rows = sum(math.ceil(problem.group_size * n / block_m) for n, _ in problem.sequences) / problem.batch
        if (problem.seqused or problem.varlen) and not problem.window:  # splits behind the last key end at once
            used = max(1, round(sum(n for _, n in problem.sequences) / problem.batch))
            steps, busy = math.ceil(min(keys, used) / block_n), math.ceil(used / keys)
        blocks = round(rows * problem.kv_heads * problem.batch * busy)
        cluster = splits if params.get("MERGE") == "cluster" else 1
        splits = splits if "SPLITS" in params else 1
        partial = splits * math.prod(problem.shape("o")[:3]) if splits > 1 else 0
        return Tiles(blocks, steps, steps, splits=splits, cluster=cluster, partial_rows=partial)
    tiles_a_query = 1
    if params.get("GROUP_ROWS"):
        rows_per_query, heads = group_slots(problem), problem.batch * problem.kv_heads
        tiles_a_query, block_m = max(1, rows_per_query // block_m), max(1, block_m // rows_per_query)
    mean, longest, count = _row_steps(problem, block_m, block_n)
    split = params.get("KEY_SPLIT", 1)
    schedule = params.get("SCHEDULE", "single") if family == "flash_wgmma" else "single"
    blocks = count * tiles_a_query * heads * split * params.get("DV_SPLIT", 1)
    mean, longest = mean / split, math.ceil(longest / split)
    if params.get("SCORES") == "cluster":
        return Tiles(blocks, mean, longest, cluster=params["DV_SPLIT"])
    if split == 1 or not merges_in_memory(problem, FlashWgmmaGenes.of(KernelConfig(family, params))):
        return Tiles(blocks, mean, longest, schedule, cluster=split)
    return Tiles(blocks, mean, longest, schedule, splits=split, partial_rows=blocks * params["BLOCK_M"])


def block_slots(gpu: GpuSpec, resident: int, cluster: int) -> int:
    """Blocks that run at once, `resident` on each SM, where those of a cluster start together."""
    if cluster <= 2:  # SMs come in pairs
        return gpu.sm_count * resident
    clusters = sum(gpc // cluster for gpc in GPCS) * gpu.sm_count // sum(GPCS)
    return max(1, clusters) * cluster * resident


def work_of(family: str, params: dict[str, Any], resident: int, problem: AttentionProblem, gpu: GpuSpec) -> Work:
    """What a config has to do on a problem. `resident`: blocks of the kernel that fit on one SM."""
    tiles = tiles_of(family, params, problem)
    blocks, total = tiles.blocks, tiles.blocks * tiles.mean
    if tiles.schedule != "single":
        resident = params["BLOCKS_PER_SM"]
    alone, slots = block_slots(gpu, 1, tiles.cluster), block_slots(gpu, resident, tiles.cluster)
    beside = min(resident, math.ceil(blocks / alone))
    if tiles.schedule == "balanced":
        waves = blocks / slots
        longest = total / min(slots, max(1, blocks - 1))
        shared = longest * resident
    elif tiles.longest != tiles.mean:  # a causal mask: the longest first, the short ones fill up
        waves = max(1.0, blocks / slots)
        if blocks <= slots:
            longest = float(tiles.longest)
            shared = longest * beside * (0.5 + 0.5 * tiles.mean / tiles.longest)
        else:
            longest = max(tiles.longest, total / slots + 0.5 * tiles.longest)
            shared = longest * resident
    else:
        full, rest = divmod(blocks, slots)
        waves = full + (rest > 0)
        longest = tiles.longest * waves
        shared = tiles.longest * (full * resident + math.ceil(rest / alone))
    moved = problem.bytes / gpu.dram_gb_per_s / 1e3
    cached = L2_SHARE * gpu.l2_bytes / gpu.dram_gb_per_s / 1e3
    tile = params["BLOCK_M"] * params["BLOCK_N"] / USUAL_TILE
    steps = total / gpu.sm_count
    rows = math.prod(problem.shape("o")[:3])
    merged = tiles.splits if tiles.splits > 1 else 0
    partial = tiles.partial_rows * (problem.head_dim_v + STATE_VALUES) * PARTIAL_BYTES
    out = rows * problem.head_dim_v * problem.element_bytes
    apart = problem.layout == "bshd" and problem.kv_heads > 1
    columns = problem.head_dim + (0 if problem.shared_kv else problem.head_dim_v)
    read = total * params["BLOCK_N"] * columns * problem.element_bytes
    return Work(
        1.0,
        waves,
        longest,
        shared * tile,
        max(0.0, moved - cached),
        steps * tile,
        moved,
        float(merged > 0),
        merged,
        partial / gpu.dram_gb_per_s / 1e3,
        out / gpu.dram_gb_per_s / 1e3,
        read / gpu.dram_gb_per_s / 1e3,
        max(0.0, moved - cached) * apart,
        rows / gpu.sm_count if merged and family in PACKED and params.get("MERGE", "kernel") == "kernel" else 0.0,
    )


def predicted_us(constants: tuple[float, ...], work: tuple[float, ...]) -> float:
    """The time that the constants of a kernel give its work, in µs: for choosing among kernels, not for publishing."""
    return sum(c * w for c, w in zip(constants, work, strict=True))
