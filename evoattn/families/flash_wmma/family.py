"""Flash attention on tensor cores by nvcuda::wmma: one kernel, one pass over the keys, sm_80 and newer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import Family, attention_args
from evoattn.families.flash_wmma.genes import FlashWmmaGenes
from evoattn.families.flash_wmma.refusals import why_redundant, why_too_big, why_wrong_shape
from evoattn.families.flash_wmma.resources import block_warps, smem_bytes
from evoattn.families.flash_wmma.work import launch_work
from evoattn.families.residency import WARP
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.mask import FULL_AND_CAUSAL
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


class FlashWmma(Family):
    """The `Family` of `templates/flash_wmma.cu.j2`."""

    name: ClassVar[str] = "flash_wmma"
    summary: ClassVar[str] = "tensor cores by nvcuda::wmma m16n16k16, S and P in shared memory; fp16 and bf16"
    devices: ClassVar[str] = "sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16")
    masks: ClassVar[tuple[str, ...]] = FULL_AND_CAUSAL

    def genes(self, config: KernelConfig) -> FlashWmmaGenes:
        return FlashWmmaGenes.of(config)

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if gpu.capability < (8, 0):
            return f"flash_wmma needs cp.async and bf16 matrices of sm_80 and newer, and {gpu.name} is {gpu.arch}."
        if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
            return f"flash_wmma takes a head_dim of {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {problem.head_dim}."
        if max(problem.heads, problem.batch) > MAX_GRID_YZ:
            return (
                f"flash_wmma takes at most {MAX_GRID_YZ} heads and batches (grid y and z), not "
                f"{max(problem.heads, problem.batch)}."
            )
        return None

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = self.genes(config)
        return (
            why_wrong_shape(problem, genes)
            or (why_redundant(problem, genes) if redundant else None)
            or why_too_big(problem, genes, gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = self.genes(config)
        same = (
            "BLOCK_M", "BLOCK_N", "ROW_WARPS", "COLUMN_WARPS", "THREADS_PER_ROW", "STAGES", "PADDING_BYTES",
            "BLOCKS_PER_SM",
        )  # fmt: skip
        return genes.named(*same) | {
            "ELEMENT": problem.element.cuda,
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
            "ASYNC_COPY": genes.COPY == "async",
            "Q_IN_FRAGMENTS": genes.Q_PLACE == "fragments",
            "O_IN_SHARED": genes.O_PLACE == "shared",
            "SMEM_BYTES": smem_bytes(problem, genes),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = self.genes(config)
        grid = (math.ceil(problem.seqlen_q / genes.BLOCK_M), problem.heads, problem.batch)
        return (
            KernelLaunch(
                self.name, grid, (WARP * block_warps(genes), 1, 1), smem_bytes(problem, genes), attention_args(problem)
            ),
        )

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, self.genes(config), registers)
