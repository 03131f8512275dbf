"""Attention for a head_dim of hundreds to thousands and few queries: head_dim split over blocks, any GPU of the
table."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import Family, attention_args
from evoattn.families.large_head.genes import LargeHeadGenes
from evoattn.families.large_head.refusals import why_redundant, why_too_big, why_wrong_shape
from evoattn.families.large_head.resources import is_fused, packed_rows, smem_bytes, workspace_bytes
from evoattn.families.large_head.work import launch_work
from evoattn.families.residency import WARP, why_no_memory
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.launch import Buffer, KernelLaunch, Scalar
from evoattn.model.mask import FULL_AND_CAUSAL
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MAX_HEAD_DIM = 8192
MIN_HEAD_DIM = {"fp16": 256, "bf16": 256, "fp32": 32}
"""By dtype: below it other families have tensor cores for 16 bits, but for fp32 this alone has them."""


class LargeHead(Family):
    """The `Family` of `templates/large_head.cu.j2`: any lengths, grouped heads, three masks, fp16, bf16 and fp32."""

    name: ClassVar[str] = "large_head"
    summary: ClassVar[str] = (
        "a large head_dim and few queries: head_dim split over blocks; CUDA cores, or three tf32 products for fp32"
    )
    devices: ClassVar[str] = "any GPU, sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "fp32")
    masks: ClassVar[tuple[str, ...]] = FULL_AND_CAUSAL

    def genes(self, config: KernelConfig) -> LargeHeadGenes:
        return LargeHeadGenes.of(config)

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        least = MIN_HEAD_DIM[problem.dtype]
        if not least <= problem.head_dim <= MAX_HEAD_DIM:
            return f"large_head serves head_dim {least} to {MAX_HEAD_DIM} in {problem.dtype}, not {problem.head_dim}."
        if problem.batch * problem.kv_heads > MAX_GRID_YZ:
            return (
                f"large_head puts {problem.batch} times {problem.kv_heads} K/V heads in grid z, which ends at "
                f"{MAX_GRID_YZ}."
            )
        return None

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = self.genes(config)
        return (
            why_wrong_shape(problem, genes, gpu)
            or why_too_big(problem, genes, gpu)
            or why_no_memory(problem, self.workspace(problem, config, gpu), gpu)
            or (why_redundant(problem, genes) if redundant else None)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = self.genes(config)
        same = (
            "BLOCK_M", "BLOCK_N", "DIM_SPLIT", "WARPS", "LANES", "SCORE_ROWS", "SCORE_KEYS", "VALUE_THREADS",
            "STAGES", "UNROLL", "DEPENDENT_LAUNCH",
        )  # fmt: skip
        scores_smem, smem = smem_bytes(problem, genes)
        return genes.named(*same) | {
            "ELEMENT": problem.element.cuda,
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
            "EXCHANGE": genes.EXCHANGE.upper(),
            "MATH": genes.MATH.upper(),
            "Q_IN_SHARED": genes.Q_PLACE == "shared",
            "SCORES_SMEM_BYTES": scores_smem,
            "SMEM_BYTES": smem,
            "CLUSTER_DIMS": f"__cluster_dims__({genes.DIM_SPLIT}, 1, 1)" if genes.EXCHANGE == "cluster" else "",
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        """A block for each slice of head_dim of each tile of rows; with a workspace, before that one for each tile of
        keys of each too."""
        genes = self.genes(config)
        split, block = genes.DIM_SPLIT, (WARP * genes.WARPS, 1, 1)
        x, z = math.ceil(packed_rows(problem) / genes.BLOCK_M) * split, problem.kv_heads * problem.batch
        scores_smem, smem = smem_bytes(problem, genes)
        cluster = (split if genes.EXCHANGE == "cluster" else 1, 1, 1)
        if is_fused(genes):
            no_workspace = Scalar("int64", 0)  # a null pointer
            return (
                KernelLaunch("large_head", (x, 1, z), block, smem, (*attention_args(problem), no_workspace), cluster),
            )
        args, key_tiles = ((*attention_args(problem), Buffer("partials")), math.ceil(problem.seqlen_k / genes.BLOCK_N))
        return (
            KernelLaunch("large_head_scores", (x, key_tiles, z), block, scores_smem, args),
            KernelLaunch("large_head", (x, 1, z), block, smem, args, overlaps=genes.DEPENDENT_LAUNCH),
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        genes = self.genes(config)
        return workspace_bytes(problem, genes)

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, self.genes(config), registers)
