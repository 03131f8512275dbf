"""Flash attention on Hopper: tensor copies by a producer warp, wgmma by one to four consumer warpgroups; sm_90a
only."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import ZEROED_SUFFIX, Family, softmax_scale_log2
from evoattn.families.block_list import block_list_args, block_list_constants, why_not_listed
from evoattn.families.flash_wgmma.genes import FlashWgmmaGenes
from evoattn.families.flash_wgmma.refusals import (
    why_not_all_keys,
    why_redundant,
    why_too_big,
    why_too_long,
    why_useless,
)
from evoattn.families.flash_wgmma.registers import (
    WARPGROUP_ROWS,
    WIDE_HEAD_DIM,
    begins_ahead,
    moved_registers,
    producer_warps,
    threads,
    warpgroups,
)
from evoattn.families.flash_wgmma.resources import (
    HEADS_IN_TURN,
    cluster_blocks,
    grid,
    merge_words,
    merges_in_memory,
    parts,
    parts_bytes,
    result_bytes,
    row_tiles,
    smem_bytes,
)
from evoattn.families.flash_wgmma.text import wgmma_function
from evoattn.families.flash_wgmma.work import launch_work
from evoattn.families.packed_mask import pack_launches, pack_work, packed_bytes
from evoattn.families.tensor_tiles import ELEMENT_BYTES, group_map, key_map, sliding_map, tile_map, why_not_sliding
from evoattn.families.variants import variant_args, variant_constants
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar, TensorMap
from evoattn.model.mask import FULL_AND_CAUSAL
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, Value
from evoattn.model.variant import KEY_VARIANTS, SCORE_VARIANTS

ARCH = "sm_90a"
MAX_HEAD_DIM = 256
MAP_STRIDE = 16
"""Bytes that the strides of a tensor map are multiples of."""
GANGS_ALONG_Y = "gridDim.y"
"""In `key_share.cuh`, and in no other part of the kernel."""
SCHEDULES = {"single": "SINGLE", "fixed": "FIXED", "claimed": "CLAIMED", "balanced": "BALANCED"}
STORES = {"tensor_map": "TENSOR_MAP", "rows": "ROWS", "chunks": "CHUNKS"}
RESCALES = {"always": ("ALWAYS", 0), "lazy_5": ("LAZY", 5), "lazy_8": ("LAZY", 8), "lazy_after": ("LAZY_AFTER", 0)}
RECIPE: dict[str, Value] = {"BLOCK_N": 64, "RESCALE": "lazy_5", "POLYNOMIAL_EIGHTHS": 0, "PART_TILES": 32}
"""Of rows of the same bits in every batch."""
UNPARTED = {"PART_TILES": 0}
"""Where registers hold no second O beside the first."""
COUNTERS, RESULTS = "counters" + ZEROED_SUFFIX, "results"
"""Scratch buffers: tiles claimed or results given, and results of blocks that share a tile of rows."""


class FlashWgmma(Family):
    """The `Family` of `templates/flash_wgmma.cu.j2`."""

    name: ClassVar[str] = "flash_wgmma"
    summary: ClassVar[str] = "Hopper's wgmma, tensor copies and warp specialization; fp16 and bf16"
    devices: ClassVar[str] = ARCH
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16")
    masks: ClassVar[tuple[str, ...]] = FULL_AND_CAUSAL
    writes_lse: ClassVar[bool] = True
    variants: ClassVar[tuple[str, ...]] = (*SCORE_VARIANTS, "value_dim", "shared_kv", *KEY_VARIANTS, "varlen", "blocks")

    def genes(self, config: KernelConfig) -> FlashWgmmaGenes:
        return FlashWgmmaGenes.of(config)

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
        return why_not_sliding(problem)

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = self.genes(config)
        return (
            why_not_listed(problem, genes.BLOCK_M, genes.BLOCK_N)
            or why_not_all_keys(problem, genes)
            or why_useless(problem, genes)
            or (why_redundant(problem, genes, gpu) if redundant else None)
            or why_too_long(problem, genes, gpu)
            or why_too_big(problem, genes, gpu)
        )

    def recipe(self, problem: AttentionProblem, gpu: GpuSpec) -> dict[str, Value]:
        if gpu.arch != ARCH or problem.dtype not in self.dtypes:
            return {}
        return RECIPE | (UNPARTED if problem.head_dim_v > WIDE_HEAD_DIM else {})

    def row_bits(self, problem: AttentionProblem, config: KernelConfig) -> tuple[Value, ...] | None:
        """A row meets its tiles of keys, which begin at multiples of BLOCK_N, from the last to the first; tiles in
        which it sees no key leave it as it is (`softmax/wgmma_softmax.cuh`). Parts are added up in the same order by
        one block and by several."""
        genes = self.genes(config)
        shared = (genes.KEY_SPLIT > 1 and not genes.PART_TILES) or genes.SCHEDULE == "balanced"
        if shared or problem.blocks or genes.RESCALE == "lazy_after":  # which multiplies again by another instruction
            return None
        return tuple(genes.value(name) for name in RECIPE)

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = self.genes(config)
        producer, consumer = moved_registers(genes)
        rescale, octaves = RESCALES[genes.RESCALE]
        split = cluster_blocks(problem, genes)
        same = (
            "BLOCK_M", "BLOCK_N", "STAGES", "BLOCKS_PER_SM", "OVERLAP", "PING_PONG", "KEY_SPLIT", "PART_TILES",
            "CAUSAL_SKIP", "POLYNOMIAL_EIGHTHS", "Q_IN_REGISTERS", "GROUP_ROWS",
        )  # fmt: skip
        return genes.named(*same) | {
            "CLUSTER": split,
            "CLUSTER_DIMS": f"__cluster_dims__({split}, 1, 1)" if split > 1 else "",
            "ELEMENT": problem.element.cuda,
            "HEAD_DIM": problem.head_dim,
            "VALUE_DIM": problem.head_dim_v,
            **problem.masking.constants(),
            **variant_constants(problem),
            **block_list_constants(problem),
            "AHEAD": begins_ahead(problem, genes),
            "PRODUCER_WARPS": producer_warps(genes),
            "PRODUCER_REGISTERS": producer,
            "CONSUMER_REGISTERS": consumer,
            "RESCALE": rescale,
            "LAZY_OCTAVES": octaves,
            "SCHEDULE": SCHEDULES[genes.SCHEDULE],
            "HEADS_IN_TURN": HEADS_IN_TURN[genes.TILE_ORDER],
            "STORE": STORES[genes.STORE],
            "WRITE_LSE": problem.lse,
            "SMEM_BYTES": smem_bytes(problem, genes),
            "WGMMA_QK": wgmma_function(
                "wgmma_qk", genes.BLOCK_N, problem.dtype, genes.Q_IN_REGISTERS, b_transposed=False
            ),
            "WGMMA_PV": wgmma_function(
                "wgmma_pv", problem.head_dim_v, problem.dtype, a_in_registers=True, b_transposed=True
            ),
        }

    def why_outdated(self, config: KernelConfig, source: str) -> str | None:
        """Blocks of a balanced schedule were numbered along x of the grid before they had gangs."""
        if config.params.get("SCHEDULE") == "balanced" and GANGS_ALONG_Y not in source:
            return (
                "Its balanced schedule is of an evoattn without gangs, and numbers its blocks otherwise than today's "
                "launches do."
            )
        return super().why_outdated(config, source)

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = self.genes(config)
        scratch, null = self.workspace(problem, config, gpu), Scalar("int64", 0)
        args: tuple[KernelArg, ...] = (
            *_maps(problem, genes),
            Buffer("o"),
            Buffer("lse") if problem.lse else null,
            *(Buffer(name) if name in scratch else null for name in (COUNTERS, RESULTS)),
            *size_args(problem),
            softmax_scale_log2(problem),
            *variant_args(problem),
            *block_list_args(problem),
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
        genes = self.genes(config)
        if genes.SCHEDULE == "balanced":
            results = math.prod(grid(problem, genes, gpu)) * warpgroups(genes)
            return {COUNTERS: 4 * results, RESULTS: results * result_bytes(problem)}
        if merges_in_memory(problem, genes):
            row_blocks, heads = row_tiles(problem, genes)
            results = row_blocks * heads * max(genes.KEY_SPLIT, parts(problem, genes)) * warpgroups(genes)
            words = row_blocks * heads * merge_words(problem, genes)
            return {COUNTERS: 4 * words, RESULTS: results * result_bytes(problem)}
        claims = {COUNTERS: 4} if genes.SCHEDULE == "claimed" else {}
        claims |= {RESULTS: kept} if (kept := parts_bytes(problem, genes, gpu)) else {}
        return claims | packed_bytes(problem)

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return *pack_work(problem), *launch_work(problem, self.genes(config), registers)


def size_args(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """The sizes and O's strides, as the kernels that share this template's parts take them."""
    sizes = problem.batch, problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k
    strides = problem.strides("o")[:3]
    return (*(Scalar("int32", size) for size in sizes), *(Scalar("int64", stride) for stride in strides))


def _maps(problem: AttentionProblem, genes: FlashWgmmaGenes) -> tuple[TensorMap, ...]:
    """Of q, k, v and o."""
    maps = {tensor: key_map(problem, tensor, genes.BLOCK_N) for tensor in "kv"}
    for tensor in "qo":
        if problem.varlen and not (genes.GROUP_ROWS and tensor == "q"):  # there is no store by a map then
            maps[tensor] = sliding_map(problem, tensor, WARPGROUP_ROWS)
        elif genes.GROUP_ROWS:
            maps[tensor] = group_map(problem, tensor, WARPGROUP_ROWS)
        else:
            maps[tensor] = tile_map(problem, tensor, WARPGROUP_ROWS, tensor == "o" and genes.STORE == "chunks")
    return tuple(maps[tensor] for tensor in "qkvo")
