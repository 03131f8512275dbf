"""Flash attention on Hopper: tensor copies by a producer warp, wgmma by one to four consumer warpgroups; sm_90a
only."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from evoattn.families.base import ZEROED_SUFFIX, Family, softmax_scale_log2
from evoattn.families.block_list import block_list_constants, list_given, why_not_listed
from evoattn.families.flash_wgmma.aims import AIMS
from evoattn.families.flash_wgmma.cache import MULTIPLIED, key_product, splits_queries, why_no_cache
from evoattn.families.flash_wgmma.resources import (
    FEW_ROWS,
    HEADS_IN_TURN,
    O_CHUNK_PLACES,
    WARPGROUP_ROWS,
    WIDEST_IN_SHARED,
    FlashWgmmaGenes,
    begins_ahead,
    chunks_of,
    cluster_blocks,
    grid,
    is_persistent,
    launch_work,
    merge_words,
    merges_in_memory,
    moved_registers,
    parts,
    parts_in_global,
    producer_warps,
    registers_at_launch,
    registers_needed,
    result_bytes,
    row_tiles,
    rows_of_tiles,
    shares_sequences,
    smem_bytes,
    threads,
    warpgroups,
    widest_wgmma,
)
from evoattn.families.flash_wgmma.text import wgmma_product
from evoattn.families.given import passed, printed
from evoattn.families.mask_blocks import pack_launches, pack_work, packed_bytes
from evoattn.families.tensor_tiles import (
    CHUNK_COLUMNS,
    ELEMENT_BYTES,
    group_map,
    key_map,
    sliding_map,
    tile_map,
    why_not_sliding,
)
from evoattn.families.variants import scale_given, variant_constants, variant_given
from evoattn.families.work import LaunchWork
from evoattn.model.forward import MAIN
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.launch import NULL, Buffer, KernelArg, KernelLaunch, Scalar, TensorMap, scratch_args
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import PER_TOKEN
from evoattn.model.space import KernelConfig, SearchSpace, Value
from evoattn.model.variant import KEY_VARIANTS, SCORE_VARIANTS

ARCH = "sm_90a"
MAX_HEAD_DIM = 256
MAP_STRIDE = 16
"""Bytes that the strides of a tensor map are multiples of."""
GANGS_ALONG_Y = "gridDim.y"
"""In `key_share.cuh`, and in no other part of the kernel."""
OWN_COLUMNS = "OWN_TILES"
"""Of O, that each block of a cluster adds up: in sources since not one block does."""
RESCALES = {"always": ("ALWAYS", 0), "lazy_5": ("LAZY", 5), "lazy_8": ("LAZY", 8), "lazy_after": ("LAZY_AFTER", 0)}
RECIPE: dict[str, Any] = {"BLOCK_N": 64, "RESCALE": "lazy_after", "POLYNOMIAL_EIGHTHS": 0, "PART_TILES": 16}
"""Of rows of the same bits in every batch."""
WIDEST_LOOKING_BACK = 192
"""The head_dim up to which all kernels of the recipe have registers for RESCALE=lazy_after; beyond, it is lazy_5."""
SHORT_TILE = 48
"""BLOCK_N where there are no more keys: what follows in a tile of 64 adds zeros, so that bits are the same."""
SPLITS = tuple(int(n) for p in FlashWgmmaGenes.parameters() if p.name == "KEY_SPLIT" for n in p.values)
SPLITS_OF_PARTS = (20, 24)
"""Of rows of the same bits, where a block that takes two parts of its rows takes twice as long as those with one."""
COUNTERS, RESULTS = "counters" + ZEROED_SUFFIX, "results"
"""Scratch buffers: tiles claimed or results given, and results of blocks that share a tile of rows."""


def part_tiles(problem: AttentionProblem) -> int:
    """PART_TILES of rows of the same bits in every batch, twice as many where sums of parts pass through global memory;
    0 where all keys are in the first part."""
    tiles: int = RECIPE["PART_TILES"] * (2 if problem.head_dim_v > WIDEST_IN_SHARED else 1)
    return tiles if problem.seqlen_k > tiles * RECIPE["BLOCK_N"] else 0


class FlashWgmma(Family):
    """The `Family` of `templates/flash_wgmma.cu.j2`."""

    name: ClassVar[str] = "flash_wgmma"
    genes = FlashWgmmaGenes
    aims = AIMS
    soon_compiled: ClassVar[Mapping[str, Value]] = {"BLOCK_N": 64, "OVERLAP": False, "PING_PONG": False}
    known_for_lists = True
    summary: ClassVar[str] = "Hopper's wgmma, tensor copies and warp specialization; fp16 and bf16"
    devices: ClassVar[str] = ARCH
    writes_lse: ClassVar[bool] = True
    variants: ClassVar[tuple[str, ...]] = (
        *SCORE_VARIANTS,
        "value_dim",
        "shared_kv",
        "kv",
        "scales",
        *KEY_VARIANTS,
        "varlen",
        "blocks",
    )

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if gpu.arch != ARCH:
            return f"flash_wgmma needs wgmma and tensor maps of {ARCH}, and {gpu.name} is {gpu.arch}."
        for dim in (problem.head_dim, problem.head_dim_v):
            if dim * ELEMENT_BYTES % MAP_STRIDE:
                return (
                    f"flash_wgmma takes a head_dim whose rows are multiples of {MAP_STRIDE} bytes, for tensor maps, "
                    f"not {dim}."
                )
            if dim > MAX_HEAD_DIM:
                return f"flash_wgmma takes a head_dim of at most {MAX_HEAD_DIM}, the widest wgmma, not {dim}."
        return why_no_cache(problem) or why_not_sliding(problem)

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = FlashWgmmaGenes.of(config)
        return (
            why_not_listed(problem, genes.BLOCK_M, genes.keys)
            or why_not_all_keys(problem, genes)
            or why_useless(problem, genes)
            or (why_not_converted(problem, genes) if problem.kv else None)
            or (why_redundant(problem, genes, gpu) if redundant else None)
            or self.why_too_long(problem, config, gpu)
            or why_too_big(problem, genes, gpu)
        )

    def why_too_long(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return why_too_long(problem, FlashWgmmaGenes.of(config), gpu)

    def recipe(self, problem: AttentionProblem, gpu: GpuSpec) -> dict[str, Value]:
        if gpu.arch != ARCH or problem.dtype not in self.dtypes:
            return {}
        own: dict[str, Value] = {"PART_TILES": part_tiles(problem)}
        if max(problem.head_dim, problem.head_dim_v) > WIDEST_LOOKING_BACK:
            own["RESCALE"] = "lazy_5"
        elif problem.seqlen_k <= RECIPE["BLOCK_N"]:
            own["RESCALE"] = "always"  # a row's one tile sets its shift to its maximum, as lazy_after does
        if problem.seqlen_k <= SHORT_TILE:
            own["BLOCK_N"] = SHORT_TILE
        return RECIPE | own

    def space(self, problem: AttentionProblem, gpu: GpuSpec) -> SearchSpace:
        whole = super().space(problem, gpu)
        if problem.batch_invariant:
            return whole
        rows = ("64", "128", "192", "256")  # not FEW_ROWS
        splits = tuple(str(split) for split in SPLITS if split not in SPLITS_OF_PARTS)
        own = dict(BLOCK_M=rows, KEY_SPLIT=splits, PART_TILES=("0",), PARTS_MERGE=("memory",), KEYS_AT_ONCE=("0",))
        return whole.restricted(own)

    def row_bits(self, problem: AttentionProblem, config: KernelConfig) -> tuple[Value, ...] | None:
        """A row meets its tiles of keys, which begin at multiples of BLOCK_N, from the last to the first; tiles in
        which it sees no key leave it as it is (`softmax/wgmma_softmax.cuh`). Parts are added up in the same order by
        one block and by several; of one part nothing is added up."""
        genes = FlashWgmmaGenes.of(config)
        shared = (genes.KEY_SPLIT > 1 or genes.SCHEDULE == "balanced") and not genes.PART_TILES
        if shared or problem.blocks or (genes.RESCALE == "lazy_after" and not problem.batch_invariant):
            return None
        one = {"PART_TILES": 0} if parts(problem, genes) == 1 else {}
        return tuple(one.get(name, genes.value(name)) for name in RECIPE)

    def over_eight_bits(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> KernelConfig | None:
        """With tiles as near as there is room for beside those that come; else of fewer rows, or in fewer blocks."""
        genes = FlashWgmmaGenes.of(config)
        sizes = next(p.values for p in self.genes.parameters() if p.name == "BLOCK_N")
        own: dict[str, Value] = {"PRODUCER": "warpgroup"}
        if problem.scales == PER_TOKEN:
            own["RESCALE"] = "always"
        elif splits_queries(problem) and genes.RESCALE == "lazy_after":
            own["RESCALE"] = "lazy_8"
        if shares_sequences(problem, genes):  # blocks do not add up rows with scales
            own["SCHEDULE"] = "claimed"
        one_group: dict[str, Value] = {"BLOCK_M": WARPGROUP_ROWS, "PING_PONG": False, "CAUSAL_SKIP": False}
        fewer_blocks = one_group | {"BLOCKS_PER_SM": max(1, genes.BLOCKS_PER_SM - 1)}
        for rows in ({}, {"BLOCK_M": min(genes.BLOCK_M, 2 * WARPGROUP_ROWS)}, one_group, fewer_blocks):
            for keys in sorted((int(size) for size in sizes if int(size) <= genes.BLOCK_N), reverse=True):
                for stages in range(genes.STAGES, min(2, genes.STAGES) - 1, -1):
                    params = config.params | own | rows | {"BLOCK_N": keys, "STAGES": stages}
                    found = KernelConfig(self.name, params)
                    if not self.why_impossible(problem, found, gpu):
                        return found
        return None

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = FlashWgmmaGenes.of(config)
        producer, consumer = moved_registers(genes, bool(problem.kv))
        steps, of_keys = key_product(problem)
        rescale, octaves = RESCALES[genes.RESCALE]
        if problem.batch_invariant and rescale == "LAZY_AFTER":
            rescale = "LAZY_ROWS"
        split = cluster_blocks(problem, genes)
        return {
            "BLOCK_N": genes.keys,
            "SHIFT_KEYS": genes.BLOCK_N,
            "CLUSTER": split,
            "PARTS_IN_GLOBAL": parts_in_global(problem, genes),
            "CLUSTER_DIMS": f"__cluster_dims__({split}, 1, 1)" if split > 1 else "",
            **variant_constants(problem),
            **block_list_constants(problem),
            "KV_ELEMENT": problem.element_of("k").cuda,
            "SCALES_BY_KEY": problem.scales == PER_TOKEN,
            "SPLITS_QUERIES": splits_queries(problem),
            **printed(VARIANT=variant_given(problem), SCALE=scale_given(problem, *"kv"), KEY_LIST=list_given(problem)),
            "AHEAD": begins_ahead(problem, genes),
            "PRODUCER_WARPS": producer_warps(genes),
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "RESCALE": rescale,
            "LAZY_OCTAVES": octaves,
            "HEADS_IN_TURN": HEADS_IN_TURN[genes.TILE_ORDER],
            "SMEM_BYTES": smem_bytes(problem, genes),
            "WGMMA_QK": wgmma_product(
                "wgmma_qk",
                steps,
                genes.keys,
                of_keys,
                genes.Q_IN_REGISTERS,
                b_transposed=False,
            ),
            "WGMMA_PV": wgmma_product(
                "wgmma_pv",
                genes.keys // problem.element.mma_k,
                problem.head_dim_v,
                MULTIPLIED if problem.kv else problem.dtype,
                a_in_registers=True,
                b_transposed=True,
                first_step=genes.BLOCK_N // problem.element.mma_k if genes.KEYS_AT_ONCE else 0,  # later keys come first
            ),
        }

    def why_outdated(self, config: KernelConfig, source: str) -> str | None:
        """Blocks of a balanced schedule were numbered along x of the grid before they had gangs; of a cluster the first
        block alone added up all parts, in more shared memory."""
        if config.params.get("SCHEDULE") == "balanced" and GANGS_ALONG_Y not in source:
            return (
                "Its balanced schedule is of an evoattn without gangs, and numbers its blocks otherwise than today's "
                "launches do."
            )
        if config.params.get("PARTS_MERGE") == "cluster" and OWN_COLUMNS not in source:
            return "One block of its cluster adds up all parts, in shared memory that today's launches leave out."
        return super().why_outdated(config, source)

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = FlashWgmmaGenes.of(config)
        args: tuple[KernelArg, ...] = (
            *_maps(problem, genes),
            Buffer("o"),
            Buffer("lse") if problem.lse else NULL,
            *scratch_args(self.workspace(problem, config, gpu), COUNTERS, RESULTS),
            *size_args(problem),
            softmax_scale_log2(problem),
            *passed(variant_given(problem), scale_given(problem, *"kv"), list_given(problem)),
        )
        before = pack_launches(problem)
        return (
            *before,
            KernelLaunch(
                self.name,
                grid(problem, genes, gpu),
                (threads(genes), 1, 1),
                smem_bytes(problem, genes),
                args,
                (cluster_blocks(problem, genes), 1, 1),
                overlaps=bool(before),
                together=genes.KEY_SPLIT if merges_in_memory(problem, genes) else 1,
            ),
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        genes = FlashWgmmaGenes.of(config)
        if genes.SCHEDULE == "balanced":
            ends = 2 if shares_sequences(problem, genes) else 1  # of a block's share, where tiles of rows may be cut
            results = ends * math.prod(grid(problem, genes, gpu)) * warpgroups(genes)
            return {COUNTERS: 4 * results, RESULTS: results * result_bytes(problem)}
        if merges_in_memory(problem, genes):
            row_blocks, heads = row_tiles(problem, genes)
            results = row_blocks * heads * max(genes.KEY_SPLIT, parts(problem, genes)) * warpgroups(genes)
            words = row_blocks * heads * merge_words(problem, genes)
            return {COUNTERS: 4 * words, RESULTS: results * result_bytes(problem)}
        made = {COUNTERS: 4} if genes.SCHEDULE == "claimed" else {}
        if parts_in_global(problem, genes):
            made[RESULTS] = math.prod(grid(problem, genes, gpu)) * warpgroups(genes) * result_bytes(problem)
        return made | packed_bytes(problem)

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return *pack_work(problem), *launch_work(problem, FlashWgmmaGenes.of(config), registers)


def size_args(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """The sizes and O's strides, as the kernels that share this template's parts take them."""
    sizes = problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k
    strides = problem.strides("o")[:3]
    return (*(Scalar("int32", size) for size in sizes), *(Scalar("int64", stride) for stride in strides))


def _maps(problem: AttentionProblem, genes: FlashWgmmaGenes) -> tuple[TensorMap, ...]:
    """Of q, k, v and o."""
    maps = {tensor: key_map(problem, tensor, genes.keys) for tensor in "kv"}
    for tensor in "qo":
        if problem.varlen and not (genes.GROUP_ROWS and tensor == "q"):  # there is no store by a map then
            maps[tensor] = sliding_map(problem, tensor, WARPGROUP_ROWS)
        elif genes.GROUP_ROWS:
            maps[tensor] = group_map(problem, tensor, WARPGROUP_ROWS)
        else:
            maps[tensor] = tile_map(problem, tensor, WARPGROUP_ROWS, tensor == "o" and genes.STORE == "chunks")
    return tuple(maps[tensor] for tensor in MAIN)


MAX_KEY_TILES = 1 << 15
"""Of a balanced schedule, which packs a range of them into a word (`key_share.cuh`)."""

MOST_UNITS, ROWS_UNITS = 1 << 30, 3
"""Key tiles of all tiles of rows, counted in int32, and how many a tile of rows adds to them for what it costs
(`sequence_share.cuh`)."""
MAX_ROWS = (1 << 31) - 1
"""Of a head, to the end of the last tile: `tile_rows.cuh` counts them in int32."""


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


def why_not_converted(problem: AttentionProblem, genes: FlashWgmmaGenes) -> str | None:
    """Genes that do not go with K and V of 8 bits, of which warps beside the one that copies make 16."""
    if genes.PRODUCER != "warpgroup":
        return "PRODUCER=warp: K and V of 8 bits need PRODUCER=warpgroup, three of whose warps make 16 bits of them."
    if splits_queries(problem) and genes.RESCALE == "lazy_after":
        return "RESCALE=lazy_after: scores of queries that are sums of two numbers are not made once more."
    if problem.scales == PER_TOKEN and genes.RESCALE != "always":
        return f"RESCALE={genes.RESCALE}: weights with a part of V's scale of each key need RESCALE=always."
    if shares_sequences(problem, genes):
        return "SCHEDULE=balanced takes sequences of one length here: blocks do not add up rows with scales."
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
    if genes.PART_TILES and (reason := why_no_parts(problem, genes)):
        return reason
    if reason := why_no_promise(problem, genes):
        return reason
    if genes.SCHEDULE == "balanced" and not problem.varlen and (problem.causal or problem.seqused):
        return (
            "SCHEDULE=balanced needs mask=full and sequences of one length, or packed ones: it gives blocks the same "
            "number of key tiles, of which others see fewer."
        )
    if shares_sequences(problem, genes) and genes.STORE != "rows":
        return "SCHEDULE=balanced of packed sequences needs STORE=rows: a block adds up columns of others' rows."
    if shares_sequences(problem, genes) and genes.CAUSAL_SKIP:
        return "CAUSAL_SKIP passes over tiles of one block, and SCHEDULE=balanced shares those of packed sequences."
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


def why_no_promise(problem: AttentionProblem, genes: FlashWgmmaGenes) -> str | None:
    """Genes of batch_invariant problems that do not go with the problem or the others."""
    if genes.PARTS_MERGE == "cluster" and not genes.PART_TILES:
        return "PARTS_MERGE=cluster needs PART_TILES."
    if genes.KEY_SPLIT in SPLITS_OF_PARTS and not genes.PART_TILES:
        return f"KEY_SPLIT={genes.KEY_SPLIT} needs PART_TILES."
    if genes.BLOCK_M == FEW_ROWS and not (problem.batch_invariant and genes.STORE == "rows"):
        return f"BLOCK_M={FEW_ROWS} needs batch_invariant=1, and STORE=rows: a box of a tensor map has more rows."
    if not genes.KEYS_AT_ONCE:
        return None
    told = f"KEYS_AT_ONCE={genes.KEYS_AT_ONCE}"
    if not problem.batch_invariant or genes.RESCALE != "lazy_after":
        return f"{told} needs batch_invariant=1 and RESCALE=lazy_after; elsewhere it is for BLOCK_N to say."
    if genes.PART_TILES:
        return f"{told} needs PART_TILES=0: one tile has no parts."
    return None


def why_no_parts(problem: AttentionProblem, genes: FlashWgmmaGenes) -> str | None:
    """Parts of keys that do not go with the problem, or with the other genes."""
    if not problem.batch_invariant:
        return f"PART_TILES={genes.PART_TILES} takes time for the same bits in every batch, of batch_invariant=1."
    if problem.blocks or shares_sequences(problem, genes):
        return f"PART_TILES={genes.PART_TILES} needs tiles by the mask alone."
    if genes.SCHEDULE == "balanced" and parts_in_global(problem, genes):
        return "SCHEDULE=balanced of parts needs their sums in shared memory: a block goes on with those of another."
    if genes.KEY_SPLIT > 1 and genes.CAUSAL_SKIP:
        return f"CAUSAL_SKIP passes over tiles of one block: KEY_SPLIT={genes.KEY_SPLIT} parts have several."
    if genes.PARTS_MERGE == "cluster" and cluster_blocks(problem, genes) == 1:
        return "PARTS_MERGE=cluster needs KEY_SPLIT=2, 3, 4, 6 or 8, whose results fit into shared memory."
    if genes.PARTS_MERGE == "cluster" and genes.STORE != "rows":
        return "PARTS_MERGE=cluster needs STORE=rows: each block adds up some columns, and none has whole rows of O."
    return None


def why_redundant(problem: AttentionProblem, genes: FlashWgmmaGenes, gpu: GpuSpec) -> str | None:
    """Configs that do on this problem what a smaller one does."""
    block_m, keys, order = genes.BLOCK_M, genes.keys, genes.TILE_ORDER
    row_blocks, heads = row_tiles(problem, genes)
    rows = rows_of_tiles(problem, genes)
    key_tiles, split = math.ceil(problem.seqlen_k / keys), genes.KEY_SPLIT
    if genes.GROUP_ROWS and problem.group_size == 1:
        return "GROUP_ROWS needs query heads that share a K/V head, and here each has one of its own."
    if block_m > WARPGROUP_ROWS and block_m >= 2 * rows:
        return f"BLOCK_M={block_m} for {rows} rows leaves half of the warpgroups or more without work."
    if problem.batch_invariant and block_m != FEW_ROWS and rows <= FEW_ROWS:
        return f"BLOCK_M={block_m} for {rows} rows leaves half of each lane's softmax without work."
    if keys > 48 and keys >= 2 * problem.seqlen_k:
        return f"Tiles of {keys} keys for {problem.seqlen_k} leave half of the tile or more without work."
    if split > key_tiles:
        return (
            f"KEY_SPLIT={split} leaves blocks without work: {problem.seqlen_k} keys make {key_tiles} tiles of {keys}."
        )
    if genes.PART_TILES and parts(problem, genes) == 1:
        return f"PART_TILES={genes.PART_TILES} is PART_TILES=0 for the one part that {problem.seqlen_k} keys make."
    if genes.PART_TILES and any(parts(problem, genes) <= fewer < split for fewer in SPLITS):
        return f"KEY_SPLIT={split} leaves blocks without one of the {parts(problem, genes)} parts."
    if split > 1 and row_blocks * heads > gpu.sm_count * genes.BLOCKS_PER_SM:
        return f"KEY_SPLIT={split}: the {row_blocks * heads} tiles of rows fill the SMs without it."
    if math.ceil(key_tiles / split) < genes.STAGES:
        return (
            f"STAGES={genes.STAGES} is more than the {math.ceil(key_tiles / split)} tiles of {keys} keys that a "
            "block takes."
        )
    if order != "by_head" and (row_blocks == 1 or heads <= max(1, HEADS_IN_TURN[order])):
        return f"TILE_ORDER={order} is the order of another value for {row_blocks} row blocks of {heads} heads."
    if (
        is_persistent(genes)
        and not shares_sequences(problem, genes)
        and row_blocks * heads <= gpu.sm_count * genes.BLOCKS_PER_SM
    ):
        return (
            f"SCHEDULE={genes.SCHEDULE}: the {row_blocks * heads} tiles are one wave, so that no block takes a second "
            "one."
        )
    if (
        genes.SCHEDULE == "balanced"
        and not problem.varlen
        and row_blocks * heads % (gpu.sm_count * genes.BLOCKS_PER_SM) == 0
    ):
        return f"SCHEDULE=balanced: the {row_blocks * heads} tiles are whole waves, so that it is SCHEDULE=fixed."
    return None


def why_too_long(problem: AttentionProblem, genes: FlashWgmmaGenes, gpu: GpuSpec) -> str | None:
    """More rows or key tiles than a kernel can count, or more blocks that wait for one another than run at once, which
    would take long."""
    row_blocks, heads = row_tiles(problem, genes)
    packed = problem.varlen and not genes.GROUP_ROWS  # whose queries an int32 counts
    if not packed and row_blocks * genes.BLOCK_M > MAX_ROWS:
        return f"{row_blocks} tiles of {genes.BLOCK_M} rows of each head are more rows than an int32 counts."
    if not is_persistent(genes):
        blocks = grid(problem, genes, gpu)
        if blocks[1] > MAX_GRID_YZ or blocks[2] > MAX_GRID_YZ:
            return (
                f"SCHEDULE=single, TILE_ORDER={genes.TILE_ORDER}: grid y and z end at {MAX_GRID_YZ}, and here are "
                f"{row_blocks} tiles of rows and {heads} heads of all batches."
            )
    if merges_in_memory(problem, genes) and row_blocks * heads * genes.KEY_SPLIT > gpu.sm_count * genes.BLOCKS_PER_SM:
        return (
            f"KEY_SPLIT={genes.KEY_SPLIT} of {row_blocks * heads} tiles of rows are more blocks than BLOCKS_PER_SM="
            f"{genes.BLOCKS_PER_SM} runs at once on {gpu.sm_count} SMs: they wait for one another."
        )
    if parts_in_global(problem, genes) and not (
        is_persistent(genes) or row_blocks * heads <= gpu.sm_count * genes.BLOCKS_PER_SM
    ):
        return f"PART_TILES={genes.PART_TILES} of so many columns needs one wave of blocks, which have sums in memory."
    if genes.PARTS_MERGE == "cluster" and parts(problem, genes) > genes.KEY_SPLIT:
        return f"PARTS_MERGE=cluster: each of the {parts(problem, genes)} parts needs a block of its own."
    if problem.batch_invariant and not genes.PART_TILES and part_tiles(problem):
        return f"PART_TILES=0: {problem.seqlen_k} keys are more than those of the first part."
    if problem.batch_invariant and genes.RESCALE == "always" and problem.seqlen_k > RECIPE["BLOCK_N"]:
        return f"RESCALE=always: {problem.seqlen_k} keys are more than those of one tile."
    if genes.KEYS_AT_ONCE and problem.seqlen_k > genes.KEYS_AT_ONCE:
        return f"KEYS_AT_ONCE={genes.KEYS_AT_ONCE}: {problem.seqlen_k} keys are more than those of one tile."
    key_tiles = math.ceil(problem.seqlen_k / genes.keys)
    if genes.SCHEDULE == "balanced" and key_tiles > MAX_KEY_TILES:
        return (
            f"SCHEDULE=balanced counts at most {MAX_KEY_TILES} tiles of keys: {problem.seqlen_k} keys make {key_tiles} "
            f"of {genes.keys}."
        )
    if (
        shares_sequences(problem, genes)
        and max(row_blocks * MAX_KEY_TILES, row_blocks * heads * (key_tiles + ROWS_UNITS)) > MOST_UNITS
    ):
        return (
            f"SCHEDULE=balanced counts key tiles of packed sequences in int32, and at most {MAX_KEY_TILES} tiles of "
            f"rows of a head: here there may be {row_blocks}, of {heads} heads with {key_tiles} key tiles each."
        )
    return None


def _tiles_of(genes: FlashWgmmaGenes) -> str:
    at_once = f"KEYS_AT_ONCE={genes.KEYS_AT_ONCE} " if genes.KEYS_AT_ONCE else ""
    tile = f"BLOCK_M={genes.BLOCK_M} BLOCK_N={genes.BLOCK_N} {at_once}"
    return f"{tile}STAGES={genes.STAGES} KEY_SPLIT={genes.KEY_SPLIT}"


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
    producer, consumer = moved_registers(genes, bool(problem.kv))
    moves = genes.PRODUCER == "warpgroup" and (consumer > 0 or not problem.kv)
    if moves and (consumer <= launch or producer >= launch):
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
