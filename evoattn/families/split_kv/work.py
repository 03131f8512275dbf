"""What the kernels of split_kv do: see `evoattn.families.work`."""

from __future__ import annotations

import math
from functools import lru_cache

from evoattn.families.merge_work import merge_work
from evoattn.families.residency import WARP, register_cap
from evoattn.families.split_kv.genes import SplitKvGenes
from evoattn.families.split_kv.resources import (
    cluster_blocks,
    kv_bytes,
    lane_vectors,
    listed_keys,
    packed_rows,
    registers_needed,
    row_blocks,
    smem_bytes,
    split_of,
    tile_heads,
    used_by_split,
    warp_keys,
)
from evoattn.families.work import CONVERSION, LaunchWork, Step, bias_bytes, tensor_bytes, together, up_to, variant_step
from evoattn.model.mask import MaskKind
from evoattn.model.problem import AttentionProblem

MMA_WAIT, SHUFFLE_WAIT, LOAD_WAIT, FIRST_WAIT = 18, 24, 30, 900
PLACE_LANES = 4.5
"""Lanes that find the place of a score, where a score has one: counted by the interpreter."""
LAST_BLOCK_WAIT, CLUSTER_WAIT = 2500, 1500
"""Clocks until the sums of the other blocks are there: a counter and their results in L2; through a cluster's shared
memory."""


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
