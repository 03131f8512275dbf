"""What the kernels of flash_wgmma do: see `evoattn.families.work`."""

from __future__ import annotations

import math

from evoattn.families.dealt import DealtTiles
from evoattn.families.flash_wgmma.genes import FlashWgmmaGenes
from evoattn.families.flash_wgmma.registers import (
    WARPGROUP_ROWS,
    begins_ahead,
    moved_registers,
    registers_at_launch,
    registers_needed,
    threads,
    warpgroups,
)
from evoattn.families.flash_wgmma.resources import (
    HEADS_IN_TURN,
    cluster_blocks,
    is_persistent,
    merges_in_memory,
    parts,
    result_bytes,
    row_tiles,
    smem_bytes,
    tiles_in_order,
)
from evoattn.families.residency import WARP
from evoattn.families.row_blocks import batches
from evoattn.families.tensor_tiles import group_slots
from evoattn.families.work import (
    LaunchWork,
    Step,
    bias_bytes,
    blocks_of_sequence,
    row_steps,
    tensor_bytes,
    together,
    up_to,
    variant_step,
    visit_share,
)
from evoattn.model.problem import AttentionProblem

SOFTMAX_WAIT, FIRST_WAIT, CLUSTER_WAIT, MEMORY_WAIT = 170, 1300, 1500, 4000
"""Clocks: of a tile's dependent instructions; of a block's first loads and last stores; of a merge in a cluster; of one
in global memory, which was not measured."""
PART_WAIT = 3000
"""Clocks: of a part whose sum is added to that of those before, with products that nothing overlaps. On an H100 a
second part took 8 to 17 % more of some 1,400 keys."""
BEGIN_WAIT, ONCE_WAITS = 400, {"single": 0, "fixed": 600, "claimed": 900, "balanced": 5000}
"""Clocks: of a block that begins where another ended; of a persistent block, once, by SCHEDULE: its first tile's place,
a counter in memory, and results that blocks exchange there. Estimates, from what the other terms left of times of an
H200."""
COPY_WAIT = 90
"""Clocks of a copy of 64 columns of the keys of a tile that one page holds: with pages of 16 keys, or tiles that are no
multiples of a page, kernels of an H200 took up to twice as long."""
SCORE_OPERATIONS = {"always": 4.5, "lazy_5": 4.0, "lazy_8": 4.0, "lazy_after": 3.5}


def launch_work(problem: AttentionProblem, genes: FlashWgmmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The one launch. A step's `waits` leave out the products: they are in `tensor_flops`."""
    rows, keys, groups = genes.BLOCK_M, genes.BLOCK_N, warpgroups(genes)
    mean, most, count = row_steps(problem, rows, keys, group_slots(problem) if genes.GROUP_ROWS else 1)
    own = blocks_of_sequence(problem, count)
    _, heads = row_tiles(problem, genes)
    split, tiles, sharers = genes.KEY_SPLIT, count * heads, heads // (problem.kv_heads * batches(problem))
    copies = keys // math.gcd(keys, problem.page) * _widths(problem) / 64 if problem.page else 0.0
    return (
        LaunchWork(
            "flash_wgmma",
            tiles * split,
            threads(genes),
            4 * groups,
            smem_bytes(problem, genes),
            registers or registers_at_launch(genes),
            together(variant_step(problem, rows * keys), _step(problem, genes, groups, copies)),
            mean / (min(split, math.ceil(mean / genes.PART_TILES)) if genes.PART_TILES else split),
            _most_tiles(genes, most),
            _ends(problem, genes, groups),
            tensor="wgmma",
            schedule=genes.SCHEDULE,
            once_waits=ONCE_WAITS[genes.SCHEDULE],
            longest_first=problem.causal and (is_persistent(genes) or HEADS_IN_TURN[genes.TILE_ORDER] != 1),
            in_flight_bytes=(genes.STAGES * (problem.head_dim + problem.head_dim_v) - problem.head_dim_v) * keys * 2,
            read_bytes=tensor_bytes(problem, "q", "k", "v") + bias_bytes(problem),
            write_bytes=tensor_bytes(problem, "o"),
            sweep_bytes=tensor_bytes(problem, "k", "v"),
            sweepers=own * sharers * split,
            visits=own,
            visit_share=visit_share(problem, mean, keys),
            heads_in_turn=(HEADS_IN_TURN[genes.TILE_ORDER] or heads) / sharers,
            order=tiles_in_order(problem, genes) if genes.SCHEDULE == "balanced" else None,
            dealt=_dealt(problem, genes) if genes.SCHEDULE == "fixed" else None,
            cluster=cluster_blocks(problem, genes),
            genes=_numbers(problem, genes, groups, copies, tiles),
        ),
    )


def _most_tiles(genes: FlashWgmmaGenes, most: int) -> int:
    """Of the tiles of keys of a tile of rows, those of the block that has most."""
    part = genes.PART_TILES or 1
    return min(most, -(-most // (genes.KEY_SPLIT * part)) * part)


def _dealt(problem: AttentionProblem, genes: FlashWgmmaGenes) -> DealtTiles | None:
    if not (problem.varlen or problem.seqused):
        return None
    heads, slots = row_tiles(problem, genes)[1], group_slots(problem) if genes.GROUP_ROWS else 1
    return DealtTiles(problem, genes.BLOCK_M, genes.BLOCK_N, slots, heads, HEADS_IN_TURN[genes.TILE_ORDER])


def _widths(problem: AttentionProblem) -> int:
    """Columns of K, in whole steps of the products, and of V."""
    return up_to(problem.head_dim, 16) + problem.head_dim_v


def _step(problem: AttentionProblem, genes: FlashWgmmaGenes, groups: int, copies: float) -> Step:
    """A block's work on a tile of keys, but for a variant's own."""
    rows, keys, value_dim = genes.BLOCK_M, genes.BLOCK_N, problem.head_dim_v
    scores, polynomial = rows * keys, genes.POLYNOMIAL_EIGHTHS / 8
    rescaled = rows * value_dim if genes.RESCALE == "always" else 0
    lanes = scores * (SCORE_OPERATIONS[genes.RESCALE] + 5 * polynomial) + rescaled
    tile_bytes = keys * (up_to(problem.head_dim, 64) + up_to(value_dim, 64)) * 2
    reads = groups * tile_bytes + (0 if genes.Q_IN_REGISTERS else rows * up_to(problem.head_dim, 16) * 2)
    return Step(
        2.0 * scores * _widths(problem),
        lanes,
        scores * (1 - polynomial) + rescaled / 64,
        lanes / WARP + scores * (1 - polynomial) / WARP + 20 * 4 * groups,
        reads + tile_bytes,
        keys * (problem.head_dim + value_dim) * 2,
        SOFTMAX_WAIT + (40 if genes.PING_PONG else 0) + COPY_WAIT * copies,
    )


def _ends(problem: AttentionProblem, genes: FlashWgmmaGenes, groups: int) -> Step:
    """A block's first loads, last stores and merges."""
    rows, value_dim, split = genes.BLOCK_M, problem.head_dim_v, genes.KEY_SPLIT
    in_memory = merges_in_memory(problem, genes)
    merges = 2 * (split - 1) / split * groups * result_bytes(problem)  # all but one block write, and one reads
    merge_wait = MEMORY_WAIT if in_memory else CLUSTER_WAIT if split > 1 else 0
    added = parts(problem, genes) - 1 if split == 1 else 0
    merges += 2 * added * groups * result_bytes(problem)
    merge_wait += added * PART_WAIT
    return Step(
        instructions=rows * value_dim / WARP * 1.5 + 60 * groups * 4,
        shared_bytes=2.0 * rows * value_dim * 2 + (0 if in_memory else merges),
        loaded_bytes=rows * (problem.head_dim + value_dim) * 2.0 + merges,
        waits=FIRST_WAIT + merge_wait + (0 if is_persistent(genes) else BEGIN_WAIT),
    )


def _numbers(
    problem: AttentionProblem, genes: FlashWgmmaGenes, groups: int, copies: float, tiles: int
) -> dict[str, float]:
    """What else may matter: `LaunchWork.genes`."""
    rows = genes.BLOCK_M
    key_tiles = math.ceil(problem.seqlen_k / genes.BLOCK_N)
    most_tiles = math.ceil(key_tiles / genes.KEY_SPLIT)
    have = moved_registers(genes)[1] or registers_at_launch(genes)
    return {
        "warpgroups": groups,
        "stages": genes.STAGES,
        "asked blocks": genes.BLOCKS_PER_SM,
        "producer group": genes.PRODUCER == "warpgroup",
        "overlapped": genes.OVERLAP,
        "ping pong": genes.PING_PONG,
        "rescale": ("always", "lazy_5", "lazy_8", "lazy_after").index(genes.RESCALE),
        "key split": genes.KEY_SPLIT,
        "cluster": cluster_blocks(problem, genes),
        "merges in memory": merges_in_memory(problem, genes),
        "key tiles": key_tiles,
        "most key tiles": most_tiles,
        "idle key tiles": genes.KEY_SPLIT * most_tiles - key_tiles,
        "schedule": ("single", "fixed", "claimed", "balanced").index(genes.SCHEDULE),
        "heads in turn": HEADS_IN_TURN[genes.TILE_ORDER] or 64,
        "causal skip": genes.CAUSAL_SKIP,
        "skipped": genes.CAUSAL_SKIP * (rows - WARPGROUP_ROWS) / genes.BLOCK_N if problem.causal else 0,
        "polynomial": genes.POLYNOMIAL_EIGHTHS,
        "q registers": genes.Q_IN_REGISTERS,
        "store": ("tensor_map", "rows", "chunks").index(genes.STORE),
        "begins ahead": begins_ahead(problem, genes),
        "spare registers": have - registers_needed(problem, genes),
        "wide rows": problem.head_dim_v % 64 != 0,
        "copies": copies,
        "grouped rows": genes.GROUP_ROWS,
        "filled rows": math.prod(problem.shape("o")[:3]) / (tiles * rows),
        "empty tiles": math.prod(row_tiles(problem, genes)) / tiles - 1 if problem.varlen else 0.0,
    }
