"""Flash attention for a head_dim beyond 256 on tensor cores by mma.sync: K and V in chunks, sm_80 and newer."""

import math
from typing import Any, ClassVar

from evoattn.families.base import Family, attention_args
from evoattn.families.large_head_mma.resources import (
    CHUNK,
    LargeHeadMmaGenes,
    block_warps,
    dim_blocks,
    dim_steps,
    in_cluster,
    launch_work,
    q_bytes,
    registers_needed,
    slice_elements,
    smem_bytes,
    stage_bytes,
)
from evoattn.families.residency import WARP, why_not_resident, why_same_code, why_too_few_registers
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 264, 2048


class LargeHeadMma(Family):
    """The `Family` of `templates/large_head_mma.cu.j2`: any lengths, grouped heads, three masks, fp16 and bf16."""

    name: ClassVar[str] = "large_head_mma"
    genes = LargeHeadMmaGenes
    summary: ClassVar[str] = "tensor cores by mma.sync for a head_dim beyond 256: K and V in chunks; fp16 and bf16"
    devices: ClassVar[str] = "sm_80 and newer"

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        return self.why_too_old(gpu) or self.why_no_head_dim(MIN_HEAD_DIM, MAX_HEAD_DIM, problem.head_dim)

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = LargeHeadMmaGenes.of(config)
        return (
            why_wrong_shape(problem, genes, gpu)
            or (why_redundant(problem, genes) if redundant else None)
            or why_too_big(problem, genes, gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = LargeHeadMmaGenes.of(config)
        order = genes.BLOCK_ORDER
        return {
            "IN_CLUSTER": in_cluster(genes),
            "CLUSTER_DIMS": f"__cluster_dims__({genes.DV_SPLIT}, 1, 1)" if in_cluster(genes) else "",
            "Q_STREAMED": genes.Q_PLACE == "streamed",
            "SWIZZLED": genes.SMEM_LAYOUT == "swizzled",
            "HEADS_FASTEST": order.startswith("heads"),
            "ROWS_REVERSED": order.endswith("reversed"),
            "SMEM_BYTES": smem_bytes(problem, genes),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = LargeHeadMmaGenes.of(config)
        blocks = math.ceil(problem.seqlen_q / genes.BLOCK_M) * problem.heads * problem.batch * genes.DV_SPLIT
        smem, cluster = smem_bytes(problem, genes), (genes.DV_SPLIT if in_cluster(genes) else 1, 1, 1)
        return (
            KernelLaunch(
                self.name, (blocks, 1, 1), (WARP * block_warps(genes), 1, 1), smem, attention_args(problem), cluster
            ),
        )

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, LargeHeadMmaGenes.of(config), registers)


MAX_WARPS = 16


def why_wrong_shape(problem: AttentionProblem, genes: LargeHeadMmaGenes, gpu: GpuSpec) -> str | None:
    """Tiles and chunks that are not whole, and warps that have nothing to do."""
    block_m, block_n, row_warps, column_warps = (genes.BLOCK_M, genes.BLOCK_N, genes.ROW_WARPS, genes.COLUMN_WARPS)
    threads, columns = WARP * block_warps(genes), 16 * column_warps * dim_blocks(problem, genes)
    if block_m % (16 * row_warps):
        return f"BLOCK_M={block_m} rows do not divide into tiles of 16 for ROW_WARPS={row_warps}."
    if block_n % (16 * column_warps):
        return f"BLOCK_N={block_n} keys do not divide into steps of 16 for COLUMN_WARPS={column_warps}."
    if block_n % genes.KEY_CHUNK:
        return f"BLOCK_N={block_n} keys do not divide into chunks of KEY_CHUNK={genes.KEY_CHUNK}."
    if problem.head_dim % (CHUNK * genes.DV_SPLIT):
        return (
            f"DV_SPLIT={genes.DV_SPLIT} does not divide head_dim {problem.head_dim} into whole chunks of {CHUNK} "
            "elements."
        )
    if in_cluster(genes) and genes.DV_SPLIT == 1:
        return "SCORES=cluster does not go with DV_SPLIT=1: one block has all the scores."
    if in_cluster(genes) and gpu.capability < (9, 0):
        return f"SCORES=cluster needs the clusters of sm_90, and {gpu.name} is {gpu.arch}."
    if block_warps(genes) > MAX_WARPS:
        return (
            f"ROW_WARPS={row_warps} times COLUMN_WARPS={column_warps} is over {MAX_WARPS} warps, with which a thread "
            "has 128 registers."
        )
    if max(columns, genes.DIM_CHUNK) > CHUNK * threads:
        return (
            f"A row of a chunk has {max(columns, genes.DIM_CHUNK) // CHUNK} vectors, more than the {threads} threads "
            "that copy it."
        )
    if columns - slice_elements(problem, genes) >= columns // 4:
        return (
            f"COLUMN_WARPS={column_warps} take {columns} columns for a slice of {slice_elements(problem, genes)}: a "
            "quarter or more are zeros."
        )
    return None


def why_redundant(problem: AttentionProblem, genes: LargeHeadMmaGenes) -> str | None:
    """Configs that do what a smaller one does."""
    block_m, block_n, order = (genes.BLOCK_M, genes.BLOCK_N, genes.BLOCK_ORDER)
    rows, tiles = math.ceil(problem.seqlen_q / block_m), math.ceil(problem.seqlen_k / block_n)
    if block_m > 16 and block_m >= 2 * problem.seqlen_q:
        return f"BLOCK_M={block_m} for {problem.seqlen_q} queries leaves half of the block or more without work."
    if block_n > 16 * genes.COLUMN_WARPS and block_n >= 2 * problem.seqlen_k:
        return f"BLOCK_N={block_n} for {problem.seqlen_k} keys leaves half of the tile or more without work."
    chunks = dim_steps(problem, genes) + block_n // genes.KEY_CHUNK
    if tiles * chunks < genes.STAGES:
        return f"STAGES={genes.STAGES} is more than the {tiles * chunks} chunks that {problem.seqlen_k} keys make."
    if tiles == 1 and genes.RESCALE != "always":
        return (
            f"All {problem.seqlen_k} keys are one tile of {block_n}: RESCALE must be always, which then does nothing."
        )
    if order.endswith("reversed") and not problem.causal:
        return f"BLOCK_ORDER={order} only matters with a causal mask: without one all row blocks take the same time."
    if order != "rows" and (rows == 1 or (order == "heads" and problem.heads * problem.batch == 1)):
        return (
            f"BLOCK_ORDER={order} is the same order as rows for {rows} row blocks of {problem.heads * problem.batch} "
            "heads."
        )
    return None


def why_too_big(problem: AttentionProblem, genes: LargeHeadMmaGenes, gpu: GpuSpec) -> str | None:
    """Shared memory, threads and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    blocks, warps, smem = genes.BLOCKS_PER_SM, block_warps(genes), smem_bytes(problem, genes)
    if smem > gpu.smem_per_block:
        return (
            f"The block needs {smem} bytes of shared memory, {q_bytes(problem, genes)} of them for Q and "
            f"{stage_bytes(problem, genes)} for each of STAGES={genes.STAGES} chunks; {gpu.name} gives it "
            f"{gpu.smem_per_block}."
        )
    return (
        why_not_resident(gpu, blocks, warps, smem)
        or why_same_code(blocks, warps)
        or why_too_few_registers(blocks, warps, registers_needed(problem, genes))
    )
