"""Why a config of latent_wgmma cannot be, or is redundant, in one sentence each."""

from __future__ import annotations

from evoattn.families.latent_wgmma.genes import LatentWgmmaGenes
from evoattn.families.latent_wgmma.resources import REGISTERS, registers_needed, row_blocks, smem_bytes, split_of
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem

LEAST_STAGES = 2
"""Q Kᵀ of a tile begins before P V of the one before has ended."""
STEP_COLUMNS = 16
"""Of Q that a product of wgmma takes."""
MAX_WAVES = 4
"""Waves of blocks beyond which splitting only adds partial results."""


def why_redundant(problem: AttentionProblem, genes: LatentWgmmaGenes, gpu: GpuSpec) -> str | None:
    """Configs that do on this problem what a smaller one does."""
    keys, (splits, tiles) = problem.seqlen_k, split_of(problem, genes)
    if genes.BLOCK_N > 16 and 2 * keys <= genes.BLOCK_N:
        return f"BLOCK_N={genes.BLOCK_N} for {keys} keys leaves half of the tile or more without work."
    if splits < genes.SPLITS:
        return (
            f"SPLITS={genes.SPLITS} makes only {splits} splits of {tiles * genes.BLOCK_N} keys or fewer, as fewer "
            "SPLITS do."
        )
    if genes.DEPENDENT_LAUNCH and splits == 1:
        return "DEPENDENT_LAUNCH lets a second launch begin early, and one split has one."
    if tiles < genes.STAGES > LEAST_STAGES:
        return f"STAGES={genes.STAGES} is more than the {tiles} tiles of {genes.BLOCK_N} keys that a block takes."
    if genes.OVERLAP and tiles == 1:
        return "OVERLAP: a block takes one tile of keys, and nothing runs beside its softmax."
    if genes.RESCALE != "always" and tiles == 1:
        return f"RESCALE={genes.RESCALE}: a block takes one tile of keys, and rescales nothing."
    blocks = row_blocks(problem, genes) * problem.kv_heads * problem.batch
    if splits > 1 and blocks * (splits - 1) >= MAX_WAVES * gpu.sm_count:
        return f"SPLITS={splits} of {blocks} blocks are more than {MAX_WAVES} waves on {gpu.sm_count} SMs."
    return None


def why_too_big(problem: AttentionProblem, genes: LatentWgmmaGenes, gpu: GpuSpec) -> str | None:
    """Steps of Q against those that there are, shared memory and registers against the limits of the GPU."""
    if (steps := problem.head_dim // STEP_COLUMNS) < genes.Q_STEPS:
        return f"Q_STEPS={genes.Q_STEPS} is more than the {steps} steps of head_dim {problem.head_dim}."
    smem = smem_bytes(problem, genes)
    needs, given = registers_needed(problem, genes), REGISTERS[genes.WARPGROUPS]
    if smem > gpu.smem_per_block:
        return (
            f"BLOCK_N={genes.BLOCK_N} STAGES={genes.STAGES} need {smem} bytes of shared memory; {gpu.name} gives "
            f"a block {gpu.smem_per_block}."
        )
    for needed, limit in zip(needs, given, strict=True):
        if needed > limit:
            return (
                f"BLOCK_N={genes.BLOCK_N} Q_STEPS={genes.Q_STEPS} OVERLAP={genes.OVERLAP} "
                f"WARPGROUPS={genes.WARPGROUPS} need about {needed} registers per thread, which can have {limit}."
            )
    return None


def why_too_long(problem: AttentionProblem, genes: LatentWgmmaGenes) -> str | None:
    """More blocks than a grid has."""
    blocks = row_blocks(problem, genes) * split_of(problem, genes)[0]
    if blocks >= 1 << 31:
        return f"SPLITS={genes.SPLITS} make {blocks} blocks, more than a grid has."
    return None
