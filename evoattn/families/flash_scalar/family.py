"""Flash attention on CUDA cores: one kernel, one pass over the keys, any GPU of the table."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import Family, attention_args
from evoattn.families.flash_scalar.genes import FlashScalarGenes
from evoattn.families.flash_scalar.refusals import why_no_effect, why_resources, why_shape
from evoattn.families.flash_scalar.resources import block_threads, smem_bytes, width_of_values
from evoattn.families.flash_scalar.work import launch_work
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.mask import FULL_AND_CAUSAL
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, Value

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
RECIPE: dict[str, Value] = {"BLOCK_N": 32, "THREADS_PER_ROW": 8}
"""Of rows of the same bits in every batch."""


class FlashScalar(Family):
    """Any lengths, grouped heads, three masks, fp16, bf16 and fp32, head_dim 16 to 256; fp32 arithmetic throughout."""

    name: ClassVar[str] = "flash_scalar"
    summary: ClassVar[str] = "Flash attention on CUDA cores: fp32 arithmetic, register tiles, K and V by cp.async."
    devices: ClassVar[str] = "any GPU, sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "fp32")
    masks: ClassVar[tuple[str, ...]] = FULL_AND_CAUSAL

    def genes(self, config: KernelConfig) -> FlashScalarGenes:
        return FlashScalarGenes.of(config)

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
            return f"flash_scalar serves head_dim {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {problem.head_dim}."
        return None

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = self.genes(config)
        return (
            why_shape(problem, genes)
            or (why_no_effect(problem, genes, gpu) if redundant else None)
            or why_resources(problem, genes, gpu)
        )

    def recipe(self, problem: AttentionProblem, gpu: GpuSpec) -> dict[str, Value]:
        return dict(RECIPE) if problem.dtype == "fp32" else {}

    def row_bits(self, problem: AttentionProblem, config: KernelConfig) -> tuple[Value, ...] | None:
        """A row meets its tiles of keys, which begin at multiples of BLOCK_N, from the first to the last, and adds up
        products of keys and of columns in their order; sums are of THREADS_PER_ROW threads."""
        genes = self.genes(config)
        return genes.BLOCK_N, genes.THREADS_PER_ROW

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = self.genes(config)
        return {
            "ELEMENT": problem.element.cuda,
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
            "VALUE_WIDTH": width_of_values(problem, genes),
            "HEADS_FASTEST": genes.BLOCK_ORDER == "heads",
            "SMEM_BYTES": smem_bytes(problem, genes),
            **genes.named(*(name for name in config.params if name != "BLOCK_ORDER")),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        """One launch; a block for each query tile of each head of each batch entry, in one dimension."""
        genes = self.genes(config)
        blocks = math.ceil(problem.seqlen_q / genes.BLOCK_M) * problem.heads * problem.batch
        return (
            KernelLaunch(
                "flash_scalar",
                (blocks, 1, 1),
                (block_threads(genes), 1, 1),
                smem_bytes(problem, genes),
                attention_args(problem),
            ),
        )

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, self.genes(config), registers)
