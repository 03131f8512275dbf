"""Attention for few query rows and many keys: the keys are split over warps and blocks, and partial results are added
up."""

from __future__ import annotations

from typing import Any, ClassVar

from evoattn.families.base import ZEROED_SUFFIX, Family, attention_args
from evoattn.families.block_list import block_list_args, block_list_constants
from evoattn.families.merge_work import MERGE_THREADS
from evoattn.families.residency import WARP, why_no_memory
from evoattn.families.split_kv.genes import SplitKvGenes
from evoattn.families.split_kv.refusals import (
    why_no_tensor_map,
    why_not_listed,
    why_not_on_card,
    why_too_big,
    why_too_long,
    why_useless,
    why_wrong_shape,
)
from evoattn.families.split_kv.resources import (
    LEAST_STEPS,
    cluster_blocks,
    packed_heads,
    packed_rows,
    row_blocks,
    smem_bytes,
    split_of,
    tile_heads,
    warp_keys,
)
from evoattn.families.split_kv.work import launch_work
from evoattn.families.tensor_tiles import tile_map
from evoattn.families.variants import (
    lse_args,
    lse_constants,
    scale_args,
    scale_constants,
    variant_args,
    variant_constants,
)
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.mask import FULL_AND_CAUSAL
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.model.variant import EIGHT_BITS, KEY_VARIANTS, SCORE_VARIANTS, SMALL_PAGE

MAX_HEAD_DIM = 256
PARTIAL, STATE, ARRIVED = "partial", "state", "arrived" + ZEROED_SUFFIX
UNUSED_BYTES = 16
"""Of a scratch buffer that no kernel touches."""


class SplitKv(Family):
    """The `Family` of `templates/split_kv.cu.j2`.

    A row is one query of one head; the rows of all heads that share a K/V head are packed into tiles of BLOCK_M, so
    that each byte of K and V is read once for all of them where they fit into one tile (decoding).
    """

    name: ClassVar[str] = "split_kv"
    summary: ClassVar[str] = (
        "keys split over warps and blocks, partial results merged; few queries and many keys; fp16, bf16 and fp32"
    )
    devices: ClassVar[str] = "sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "fp32")
    masks: ClassVar[tuple[str, ...]] = FULL_AND_CAUSAL
    writes_lse: ClassVar[bool] = True
    variants: ClassVar[tuple[str, ...]] = (*SCORE_VARIANTS, *KEY_VARIANTS, "varlen", "blocks", *EIGHT_BITS)

    def genes(self, config: KernelConfig) -> SplitKvGenes:
        return SplitKvGenes.of(config)

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if gpu.capability < (8, 0):
            return f"split_kv needs mma.m16n8k16 and cp.async of sm_80 and newer, and {gpu.name} is {gpu.arch}."
        if problem.head_dim > MAX_HEAD_DIM:
            return f"split_kv takes a head_dim of up to {MAX_HEAD_DIM}, not {problem.head_dim}."
        if max(tile_heads(problem), problem.batch) > MAX_GRID_YZ:
            return (
                f"split_kv takes at most {MAX_GRID_YZ} K/V heads and batches (grid y and z), not "
                f"{max(tile_heads(problem), problem.batch)}."
            )
        return None

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = self.genes(config)
        return (
            why_wrong_shape(problem, genes)
            or why_not_listed(problem, genes)
            or why_too_long(problem, genes)
            or why_no_tensor_map(problem, genes, gpu)
            or (why_useless(problem, genes, gpu) if redundant else why_not_on_card(genes, gpu))
            or why_too_big(problem, genes, gpu)
            or why_no_memory(problem, self.workspace(problem, config, gpu), gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = self.genes(config)
        same = ("BLOCK_M", "BLOCK_N", "WARPS", "STAGES", "VECTOR_BYTES", "DOT_LANES", "BLOCKS_PER_SM")
        return genes.named(*same) | {
            "ELEMENT": problem.element.cuda,
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
            **variant_constants(problem, hides=True),
            **scale_constants(problem),
            **lse_constants(problem),
            **block_list_constants(problem),
            "CLUSTER": cluster_blocks(genes),
            "CLUSTER_DIMS": f"__cluster_dims__({cluster_blocks(genes)}, 1, 1)" if cluster_blocks(genes) > 1 else "",
            "COMPUTE": genes.COMPUTE.upper(),
            "DEPENDENT_LAUNCH": genes.DEPENDENT_LAUNCH.upper(),
            "LOAD": genes.LOAD,
            "SWIZZLED": genes.LOAD == "tma",
            "MERGE": genes.MERGE.upper(),
            "SMALL_PAGES": 0 < problem.page < SMALL_PAGE,
            "SMEM_BYTES": smem_bytes(problem, genes),
            "LEAST_STEPS": LEAST_STEPS,
            "MERGE_THREADS": MERGE_THREADS,
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = self.genes(config)
        (splits, keys), blocks = split_of(problem, genes), row_blocks(problem, genes)
        sizes = (Scalar("int32", n) for n in (packed_heads(problem), blocks, splits, keys))
        args: list[KernelArg] = [*attention_args(problem), *sizes, Buffer(PARTIAL), Buffer(STATE), Buffer(ARRIVED)]
        args += [
            *lse_args(problem),
            *variant_args(problem),
            *scale_args(problem),
            *block_list_args(problem, packs=False),
        ]
        if genes.LOAD == "tma":
            args[1:3] = (tile_map(problem, tensor, warp_keys(genes)) for tensor in "kv")
        partial = KernelLaunch(
            self.name,
            (blocks * splits, tile_heads(problem), problem.batch),
            (WARP * genes.WARPS, 1, 1),
            smem_bytes(problem, genes),
            tuple(args),
            (cluster_blocks(genes), 1, 1),
        )
        if splits == 1 or genes.MERGE != "kernel":
            return (partial,)
        merge_args: list[KernelArg] = [Buffer("o")]
        merge_args += [
            Scalar("int32", n) for n in (problem.seqlen_q, tile_heads(problem), packed_heads(problem), blocks, splits)
        ]
        merge_args += [Scalar("int64", stride) for stride in problem.strides("o")[:3]]
        merge_args += [Buffer(PARTIAL), Buffer(STATE), *lse_args(problem), *variant_args(problem)]
        grid = (packed_rows(problem), tile_heads(problem), problem.batch)
        overlaps = genes.DEPENDENT_LAUNCH != "none"
        return partial, KernelLaunch(
            f"{self.name}_merge", grid, (MERGE_THREADS, 1, 1), 0, tuple(merge_args), overlaps=overlaps
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        genes = self.genes(config)
        (splits, _), tiles = split_of(problem, genes), row_blocks(problem, genes) * tile_heads(problem) * problem.batch
        if splits == 1 or genes.MERGE == "cluster":
            return {PARTIAL: UNUSED_BYTES, STATE: UNUSED_BYTES, ARRIVED: UNUSED_BYTES}
        rows = tiles * splits * genes.BLOCK_M
        arrived = tiles * 4 if genes.MERGE == "last_block" else UNUSED_BYTES
        return {PARTIAL: rows * problem.head_dim * 4, STATE: rows * 8, ARRIVED: arrived}

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, self.genes(config), registers)
