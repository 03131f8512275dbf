"""Why a config of flash_wgmma cannot be, or is redundant, in one sentence each."""

from __future__ import annotations

import math

from evoattn.families.flash_wgmma.genes import FlashWgmmaGenes
from evoattn.families.flash_wgmma.registers import (
    WARPGROUP_ROWS,
    WIDE_HEAD_DIM,
    moved_registers,
    registers_at_launch,
    registers_needed,
    warpgroups,
    widest_wgmma,
)
from evoattn.families.flash_wgmma.resources import (
    HEADS_IN_TURN,
    O_CHUNK_PLACES,
    chunks_of,
    is_persistent,
    merges_in_memory,
    parts,
    parts_bytes,
    row_tiles,
    smem_bytes,
)
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, group_slots
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem

MAX_KEY_TILES = 1 << 15
"""Of a balanced schedule, which packs a range of them into a word (`key_share.cuh`)."""

MAX_ROWS = (1 << 31) - 1
"""Of a head, to the end of the last tile: `tile_rows.cuh` counts them in int32."""


MAX_PARTS_BYTES = 256 << 20


def why_not_all_keys(problem: AttentionProblem, genes: FlashWgmmaGenes) -> str | None:
    """Blocks that would share the tiles of a list, or have rows of several heads."""
    if not problem.blocks:
        return None
    if genes.KEY_SPLIT > 1 or genes.SCHEDULE == "balanced":
        name = f"KEY_SPLIT={genes.KEY_SPLIT}" if genes.KEY_SPLIT > 1 else "SCHEDULE=balanced"
        return f"{name}: a block takes all tiles of keys that a block list names."
    for name in ("GROUP_ROWS", "CAUSAL_SKIP"):
        if getattr(genes, name):
            return f"{name} needs keys by the mask alone, and here a block list names them."
    return None


def why_useless(problem: AttentionProblem, genes: FlashWgmmaGenes) -> str | None:
    """Genes that do nothing beside the others, so that the same kernel has one genes only."""
    consumers = warpgroups(genes)
    if genes.PING_PONG and (consumers == 1 or not genes.OVERLAP):
        return "PING_PONG needs two consumer warpgroups that take turns, and OVERLAP."
    if genes.KEY_SPLIT > 1 and is_persistent(genes):
        return f"KEY_SPLIT={genes.KEY_SPLIT} needs SCHEDULE=single: its blocks work on one tile of rows."
    if merges_in_memory(problem, genes) and genes.STORE != "rows":
        return f"{_tiles_of(genes)} add up columns in global memory, and need STORE=rows: no block has whole rows of O."
    if merges_in_memory(problem, genes) and problem.varlen:
        return f"{_tiles_of(genes)} add up in global memory, and need sequences of one length: they say where."
    if genes.PART_TILES and not problem.batch_invariant:
        return f"PART_TILES={genes.PART_TILES} takes time for the same bits in every batch, of batch_invariant=1."
    if genes.PART_TILES and (problem.blocks or genes.SCHEDULE == "balanced" or problem.head_dim_v > WIDE_HEAD_DIM):
        return (
            f"PART_TILES={genes.PART_TILES} needs a V of at most {WIDE_HEAD_DIM} columns, and tiles by the mask alone."
        )
    if genes.PART_TILES and genes.KEY_SPLIT > 1 and genes.CAUSAL_SKIP:
        return f"CAUSAL_SKIP passes over tiles of one block: KEY_SPLIT={genes.KEY_SPLIT} parts have several."
    if genes.SCHEDULE == "balanced" and problem.causal:
        return (
            "SCHEDULE=balanced needs mask=full: it gives blocks the same number of key tiles, of which a causal mask "
            "hides some."
        )
    if genes.SCHEDULE == "balanced" and (problem.varlen or problem.seqused):
        return "SCHEDULE=balanced needs sequences of one length: it gives blocks the same number of key tiles."
    if genes.GROUP_ROWS and problem.varlen and genes.STORE != "rows":
        return "GROUP_ROWS of packed sequences needs STORE=rows: a box of a tensor map may end in the next sequence."
    if genes.RESCALE == "lazy_after" and genes.POLYNOMIAL_EIGHTHS:
        return (
            "RESCALE=lazy_after needs POLYNOMIAL_EIGHTHS=0: the polynomial holds up to 2^127 only, and does not show "
            "when it is passed."
        )
    if genes.STORE == "chunks" and not (is_persistent(genes) and chunks_of(problem.head_dim_v) > O_CHUNK_PLACES):
        columns = O_CHUNK_PLACES * CHUNK_COLUMNS
        return (
            f"STORE=chunks needs blocks that take several tiles and a head_dim over {columns} of V: it is for an O too "
            "big to lie beside Q."
        )
    if genes.CAUSAL_SKIP and not (problem.causal and consumers > 1):
        return "CAUSAL_SKIP needs a causal mask and several warpgroups: one alone sees every key tile of its block."
    return None


def why_redundant(problem: AttentionProblem, genes: FlashWgmmaGenes, gpu: GpuSpec) -> str | None:
    """Configs that do on this problem what a smaller one does."""
    block_m, block_n, order = genes.BLOCK_M, genes.BLOCK_N, genes.TILE_ORDER
    row_blocks, heads = row_tiles(problem, genes)
    rows = problem.seqlen_q * (group_slots(problem) if genes.GROUP_ROWS else 1)
    key_tiles, split = math.ceil(problem.seqlen_k / block_n), genes.KEY_SPLIT
    if genes.GROUP_ROWS and problem.group_size == 1:
        return "GROUP_ROWS needs query heads that share a K/V head, and here each has one of its own."
    if block_m > WARPGROUP_ROWS and block_m >= 2 * rows:
        return f"BLOCK_M={block_m} for {rows} rows leaves half of the warpgroups or more without work."
    if block_n > 48 and block_n >= 2 * problem.seqlen_k:
        return f"BLOCK_N={block_n} for {problem.seqlen_k} keys leaves half of the tile or more without work."
    if split > key_tiles:
        return (
            f"KEY_SPLIT={split} leaves blocks without work: {problem.seqlen_k} keys make {key_tiles} "
            f"tiles of {block_n}."
        )
    if split > parts(problem, genes) and genes.PART_TILES:
        return f"KEY_SPLIT={split} leaves blocks without one of the {parts(problem, genes)} parts."
    if split > 1 and row_blocks * heads > gpu.sm_count * genes.BLOCKS_PER_SM:
        return f"KEY_SPLIT={split}: the {row_blocks * heads} tiles of rows fill the SMs without it."
    if math.ceil(key_tiles / split) < genes.STAGES:
        return (
            f"STAGES={genes.STAGES} is more than the {math.ceil(key_tiles / split)} tiles of {block_n} keys that a "
            "block takes."
        )
    if order != "by_head" and (row_blocks == 1 or heads <= max(1, HEADS_IN_TURN[order])):
        return f"TILE_ORDER={order} is the order of another value for {row_blocks} row blocks of {heads} heads."
    if is_persistent(genes) and row_blocks * heads <= gpu.sm_count * genes.BLOCKS_PER_SM:
        return (
            f"SCHEDULE={genes.SCHEDULE}: the {row_blocks * heads} tiles are one wave, so that no block takes a second "
            "one."
        )
    if genes.SCHEDULE == "balanced" and row_blocks * heads % (gpu.sm_count * genes.BLOCKS_PER_SM) == 0:
        return f"SCHEDULE=balanced: the {row_blocks * heads} tiles are whole waves, so that it is SCHEDULE=fixed."
    return None


def why_too_long(problem: AttentionProblem, genes: FlashWgmmaGenes, gpu: GpuSpec) -> str | None:
    """More rows or key tiles than a kernel can count, or more blocks that wait for one another than run at once, which
    would take long."""
    row_blocks, heads = row_tiles(problem, genes)
    packed = problem.varlen and not genes.GROUP_ROWS  # whose queries an int32 counts
    if not packed and row_blocks * genes.BLOCK_M > MAX_ROWS:
        return f"{row_blocks} tiles of {genes.BLOCK_M} rows of each head are more rows than an int32 counts."
    if merges_in_memory(problem, genes) and row_blocks * heads * genes.KEY_SPLIT > gpu.sm_count * genes.BLOCKS_PER_SM:
        return (
            f"KEY_SPLIT={genes.KEY_SPLIT} of {row_blocks * heads} tiles of rows are more blocks than BLOCKS_PER_SM="
            f"{genes.BLOCKS_PER_SM} runs at once on {gpu.sm_count} SMs: they wait for one another."
        )
    if parts_bytes(problem, genes, gpu) > MAX_PARTS_BYTES:
        return f"SCHEDULE={genes.SCHEDULE}: its blocks keep sums of parts in over {MAX_PARTS_BYTES >> 20} MiB."
    key_tiles = math.ceil(problem.seqlen_k / genes.BLOCK_N)
    if genes.SCHEDULE == "balanced" and key_tiles > MAX_KEY_TILES:
        return (
            f"SCHEDULE=balanced counts at most {MAX_KEY_TILES} tiles of keys: {problem.seqlen_k} keys make {key_tiles} "
            f"of {genes.BLOCK_N}."
        )
    return None


def _tiles_of(genes: FlashWgmmaGenes) -> str:
    return f"BLOCK_M={genes.BLOCK_M} BLOCK_N={genes.BLOCK_N} STAGES={genes.STAGES} KEY_SPLIT={genes.KEY_SPLIT}"


def _registers_of(genes: FlashWgmmaGenes) -> str:
    names: tuple[str, ...] = ("BLOCK_M", "BLOCK_N", "BLOCKS_PER_SM", "PRODUCER", "RESCALE", "SCHEDULE")
    names += ("Q_IN_REGISTERS",) if genes.Q_IN_REGISTERS else ()
    return " ".join(f"{name}={genes.value(name)}" for name in names)


def why_too_big(problem: AttentionProblem, genes: FlashWgmmaGenes, gpu: GpuSpec) -> str | None:
    """Shared memory, threads and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    blocks, smem = genes.BLOCKS_PER_SM, smem_bytes(problem, genes)
    if smem > gpu.smem_per_block:
        return f"{_tiles_of(genes)} need {smem} bytes of shared memory; {gpu.name} gives a block {gpu.smem_per_block}."
    if blocks * (smem + gpu.smem_reserved_per_block) > gpu.smem_per_sm:
        return (
            f"BLOCKS_PER_SM={blocks} with {_tiles_of(genes)} need {smem} bytes and 1 KB each, over the "
            f"{gpu.smem_per_sm} of an SM."
        )
    launch, needed = registers_at_launch(genes), registers_needed(problem, genes)
    producer, consumer = moved_registers(genes)
    if genes.PRODUCER == "warpgroup" and (consumer <= launch or producer >= launch):
        return (
            f"PRODUCER=warpgroup has no registers to give: BLOCK_M={genes.BLOCK_M} BLOCKS_PER_SM={blocks} starts with "
            f"{launch}."
        )
    if needed > (consumer or launch):
        return (
            f"{_registers_of(genes)} need about {needed} registers per consumer thread, which can have "
            f"{consumer or launch}."
        )
    widest = widest_wgmma(problem, genes)
    if widest > launch:
        return (
            f"One wgmma of {_registers_of(genes)} needs {widest} registers per thread at launch, where there are "
            f"{launch}."
        )
    return None
