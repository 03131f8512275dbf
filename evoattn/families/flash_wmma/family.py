"""Flash attention on tensor cores by nvcuda::wmma: one kernel, one pass over the keys, sm_80 and newer."""

import math
from typing import Any, ClassVar

from evoattn.families.base import Family, attention_args
from evoattn.families.flash_wmma.resources import (
    TILE,
    FlashWmmaGenes,
    block_warps,
    launch_work,
    registers_needed,
    smem_bytes,
    smem_parts,
    tiles_of_head,
)
from evoattn.families.residency import WARP, why_not_resident, why_too_few_registers
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256


class FlashWmma(Family):
    """The `Family` of `templates/flash_wmma.cu.j2`."""

    name: ClassVar[str] = "flash_wmma"
    genes = FlashWmmaGenes
    summary: ClassVar[str] = "tensor cores by nvcuda::wmma m16n16k16, S and P in shared memory; fp16 and bf16"
    devices: ClassVar[str] = "sm_80 and newer"

    def may_win(self, problem: AttentionProblem) -> bool:
        """It has won no measured problem."""
        return False

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        return (
            self.why_too_old(gpu, "cp.async and bf16 matrices")
            or self.why_no_head_dim(MIN_HEAD_DIM, MAX_HEAD_DIM, problem.head_dim)
            or self.why_past_grid(max(problem.heads, problem.batch))
        )

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = FlashWmmaGenes.of(config)
        return (
            why_wrong_shape(problem, genes)
            or (why_redundant(problem, genes) if redundant else None)
            or why_too_big(problem, genes, gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = FlashWmmaGenes.of(config)
        return {
            "ASYNC_COPY": genes.COPY == "async",
            "Q_IN_FRAGMENTS": genes.Q_PLACE == "fragments",
            "O_IN_SHARED": genes.O_PLACE == "shared",
            "SMEM_BYTES": smem_bytes(problem, genes),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = FlashWmmaGenes.of(config)
        grid = (math.ceil(problem.seqlen_q / genes.BLOCK_M), problem.heads, problem.batch)
        return (
            KernelLaunch(
                self.name, grid, (WARP * block_warps(genes), 1, 1), smem_bytes(problem, genes), attention_args(problem)
            ),
        )

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, FlashWmmaGenes.of(config), registers)


MAX_WARPS = 32


def why_wrong_shape(problem: AttentionProblem, genes: FlashWmmaGenes) -> str | None:
    """Tiles that do not divide over the warps, or warps without work."""
    block_m, block_n, row_warps, column_warps = (genes.BLOCK_M, genes.BLOCK_N, genes.ROW_WARPS, genes.COLUMN_WARPS)
    if block_m % (TILE * row_warps):
        return (
            f"BLOCK_M={block_m} rows are {block_m // TILE} tiles of 16, which do not divide over ROW_WARPS={row_warps}."
        )
    if block_warps(genes) > MAX_WARPS:
        return (
            f"ROW_WARPS={row_warps} times COLUMN_WARPS={column_warps} are {block_warps(genes)} warps; a block has at "
            f"most {MAX_WARPS}."
        )
    if column_warps > max(block_n // TILE, tiles_of_head(problem)):
        return (
            f"COLUMN_WARPS={column_warps} leaves warps without any of the {block_n // TILE} tiles of S and "
            f"{tiles_of_head(problem)} of O."
        )
    lanes = genes.THREADS_PER_ROW
    if block_n % (2 * lanes):
        return f"BLOCK_N={block_n} keys do not divide into pairs for THREADS_PER_ROW={lanes}."
    if genes.COPY == "registers" and genes.STAGES > 1:
        return (
            f"STAGES={genes.STAGES} overlaps nothing with COPY=registers: the copy is over when the next product "
            "begins."
        )
    return None


def why_redundant(problem: AttentionProblem, genes: FlashWmmaGenes) -> str | None:
    """Configs that do what a smaller one does."""
    block_m, block_n = genes.BLOCK_M, genes.BLOCK_N
    if block_m > TILE and block_m >= 2 * problem.seqlen_q:
        return f"BLOCK_M={block_m} for {problem.seqlen_q} queries leaves half of the block or more without work."
    if block_n > TILE and block_n >= 2 * problem.seqlen_k:
        return f"BLOCK_N={block_n} for {problem.seqlen_k} keys leaves half of the tile or more without work."
    tiles = math.ceil(problem.seqlen_k / block_n)
    if tiles < genes.STAGES:
        return f"STAGES={genes.STAGES} is more than the {tiles} tiles of {block_n} that {problem.seqlen_k} keys make."
    return None


def why_too_big(problem: AttentionProblem, genes: FlashWmmaGenes, gpu: GpuSpec) -> str | None:
    """Shared memory, threads and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    blocks, warps, smem = genes.BLOCKS_PER_SM, block_warps(genes), smem_bytes(problem, genes)
    if smem > gpu.smem_per_block:
        parts = " + ".join(f"{what} {size}" for what, size in smem_parts(problem, genes).items() if size)
        return (
            f"The block needs {smem} bytes of shared memory ({parts}); {gpu.name} gives a block {gpu.smem_per_block}."
        )
    return why_not_resident(gpu, blocks, warps, smem) or why_too_few_registers(
        blocks, warps, registers_needed(problem, genes)
    )
