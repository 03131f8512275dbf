"""Why a config of backward_scalar cannot be, or is redundant, in one sentence each."""

from __future__ import annotations

from evoattn.families.backward_scalar.genes import BackwardScalarGenes
from evoattn.families.backward_scalar.resources import EACH, estimated_registers, scratch, smem_bytes
from evoattn.families.residency import WARP, why_no_memory, why_not_resident, why_same_code, why_too_few_registers
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem


def why_shape(genes: BackwardScalarGenes) -> str | None:
    """Threads that do not fit the tiles."""
    m, n = genes.BLOCK_M, genes.BLOCK_N
    if m * n < genes.THREADS * EACH:
        return f"THREADS={genes.THREADS} are more than the BLOCK_M={m} by BLOCK_N={n} scores of a tile, {EACH} each."
    return None


def why_redundant(problem: AttentionProblem, genes: BackwardScalarGenes) -> str | None:
    """Configs that do on this problem what a smaller one does."""
    for name, rows, length in (
        ("BLOCK_M", genes.BLOCK_M, problem.seqlen_q),
        ("BLOCK_N", genes.BLOCK_N, problem.seqlen_k),
    ):
        if rows > 32 and rows >= 2 * max(length, 32):
            return f"{name}={rows} is twice the {length} that there are, or more."
    return why_same_code(genes.BLOCKS_PER_SM, genes.THREADS // WARP)


def why_too_big(problem: AttentionProblem, genes: BackwardScalarGenes, gpu: GpuSpec) -> str | None:
    """Memory and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    smem, warps = smem_bytes(problem, genes), genes.THREADS // WARP
    if smem > gpu.smem_per_block:
        return (
            f"Tiles of BLOCK_M={genes.BLOCK_M} and BLOCK_N={genes.BLOCK_N} take {smem} bytes of shared memory; a block "
            f"of {gpu.name} has {gpu.smem_per_block}."
        )
    return (
        why_not_resident(gpu, genes.BLOCKS_PER_SM, warps, smem)
        or why_too_few_registers(genes.BLOCKS_PER_SM, warps, estimated_registers(problem, genes))
        or why_no_memory(problem, scratch(problem), gpu)
    )
