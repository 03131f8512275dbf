"""Flash attention for a head_dim beyond 256 on tensor cores by mma.sync: K and V in chunks, sm_80 and newer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import Family, attention_args
from evoattn.families.large_head_mma.genes import LargeHeadMmaGenes
from evoattn.families.large_head_mma.refusals import why_redundant, why_too_big, why_wrong_shape
from evoattn.families.large_head_mma.resources import block_warps, in_cluster, smem_bytes
from evoattn.families.large_head_mma.work import launch_work
from evoattn.families.residency import WARP
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.mask import FULL_AND_CAUSAL
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 264, 2048


class LargeHeadMma(Family):
    """The `Family` of `templates/large_head_mma.cu.j2`: any lengths, grouped heads, three masks, fp16 and bf16."""

    name: ClassVar[str] = "large_head_mma"
    summary: ClassVar[str] = "tensor cores by mma.sync for a head_dim beyond 256: K and V in chunks; fp16 and bf16"
    devices: ClassVar[str] = "sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16")
    masks: ClassVar[tuple[str, ...]] = FULL_AND_CAUSAL

    def genes(self, config: KernelConfig) -> LargeHeadMmaGenes:
        return LargeHeadMmaGenes.of(config)

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if gpu.capability < (8, 0):
            return f"large_head_mma needs mma.m16n8k16 and cp.async of sm_80 and newer, and {gpu.name} is {gpu.arch}."
        if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
            return f"large_head_mma takes a head_dim of {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {problem.head_dim}."
        return None

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = self.genes(config)
        return (
            why_wrong_shape(problem, genes, gpu)
            or (why_redundant(problem, genes) if redundant else None)
            or why_too_big(problem, genes, gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = self.genes(config)
        order = genes.BLOCK_ORDER
        same = (
            "BLOCK_M", "BLOCK_N", "DV_SPLIT", "ROW_WARPS", "COLUMN_WARPS", "DIM_CHUNK", "KEY_CHUNK", "STAGES",
            "BLOCKS_PER_SM",
        )  # fmt: skip
        return genes.named(*same) | {
            "ELEMENT": problem.element.cuda,
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
            "IN_CLUSTER": in_cluster(genes),
            "CLUSTER_DIMS": f"__cluster_dims__({genes.DV_SPLIT}, 1, 1)" if in_cluster(genes) else "",
            "Q_STREAMED": genes.Q_PLACE == "streamed",
            "SWIZZLED": genes.SMEM_LAYOUT == "swizzled",
            "RESCALE": genes.RESCALE.upper(),
            "HEADS_FASTEST": order.startswith("heads"),
            "ROWS_REVERSED": order.endswith("reversed"),
            "SMEM_BYTES": smem_bytes(problem, genes),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = self.genes(config)
        blocks = math.ceil(problem.seqlen_q / genes.BLOCK_M) * problem.heads * problem.batch * genes.DV_SPLIT
        smem, cluster = smem_bytes(problem, genes), (genes.DV_SPLIT if in_cluster(genes) else 1, 1, 1)
        return (
            KernelLaunch(
                self.name, (blocks, 1, 1), (WARP * block_warps(genes), 1, 1), smem, attention_args(problem), cluster
            ),
        )

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, self.genes(config), registers)
