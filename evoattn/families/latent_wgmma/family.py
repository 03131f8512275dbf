"""Attention over a latent cache on Hopper, whose V is the first columns of K: a tile of K is loaded once and used
twice; sm_90a only."""

from typing import Any, ClassVar

from evoattn.families.flash_wgmma.text import wgmma_function, wgmma_product
from evoattn.families.latent import PARTIAL, STATE, Latent, row_blocks
from evoattn.families.latent_wgmma.resources import (
    PRODUCER_REGISTERS,
    REGISTERS,
    SCORES_ALONE,
    LatentWgmmaGenes,
    launch_work,
    registers_needed,
    smem_bytes,
    split_of,
    threads,
    value_columns,
)
from evoattn.families.residency import why_no_memory
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ROW_BYTES
from evoattn.families.work import MERGE_THREADS, LaunchWork
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch, TensorMap, scratch_args
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

RESCALES = {"always": ("ALWAYS", 0), "lazy_5": ("LAZY", 5), "lazy_8": ("LAZY", 8)}


class LatentWgmma(Latent):
    """The `Family` of `templates/latent_wgmma.cu.j2`."""

    name: ClassVar[str] = "latent_wgmma"
    genes = LatentWgmmaGenes
    summary: ClassVar[str] = "Hopper's wgmma over a latent cache, whose V is the first columns of K; fp16 and bf16"
    value_columns: ClassVar[int] = 2 * CHUNK_COLUMNS
    merge_threads: ClassVar[int] = MERGE_THREADS

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = LatentWgmmaGenes.of(config)
        return (
            why_too_big(problem, genes, gpu)
            or why_too_long(problem, genes)
            or why_no_memory(problem, self.workspace(problem, config, gpu), gpu)
            or (why_redundant(problem, genes, gpu) if redundant else None)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = LatentWgmmaGenes.of(config)
        rescale, octaves = RESCALES[genes.RESCALE]
        columns, dtype = value_columns(problem, genes), problem.dtype
        return super().constants(problem, config, gpu) | {
            "RESCALE": rescale,
            "LAZY_OCTAVES": octaves,
            "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
            "SCORES_ALONE": genes.WARPGROUPS == SCORES_ALONE,
            "SCORES_AHEAD": genes.OVERLAP and genes.WARPGROUPS != SCORES_ALONE,
            "CONSUMER_REGISTERS": REGISTERS[genes.WARPGROUPS][0],
            "HELPER_REGISTERS": REGISTERS[genes.WARPGROUPS][1],
            "SMEM_BYTES": smem_bytes(problem, genes),
            "PV_COLUMNS": columns,
            "WGMMA_QK": wgmma_function(
                "wgmma_qk_shared", genes.BLOCK_N, dtype, a_in_registers=False, b_transposed=False
            ),
            "WGMMA_QK_REGISTERS": wgmma_function(
                "wgmma_qk_registers", genes.BLOCK_N, dtype, a_in_registers=True, b_transposed=False
            ),
            "WGMMA_PV": wgmma_product(
                "wgmma_pv",
                genes.BLOCK_N // STEP_COLUMNS,
                problem.head_dim_v // 2,
                dtype,
                a_in_registers=True,
                b_transposed=True,
            ),
            "WGMMA_COLUMNS": wgmma_function(
                "wgmma_columns", columns, dtype, a_in_registers=genes.WARPGROUPS == SCORES_ALONE, b_transposed=True
            ),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = LatentWgmmaGenes.of(config)
        splits, split_tiles = split_of(problem, genes)
        p, results = problem, scratch_args(self.workspace(problem, config, gpu), PARTIAL, STATE)
        maps = _heads_map(p, genes.BLOCK_M), *self.key_maps(p, genes.BLOCK_N)
        sizes = p.kv_heads, p.seqlen_q, p.seqlen_k, p.group_size, splits, split_tiles
        args = self.first_args(p, maps, results, *sizes)
        grid = row_blocks(p, genes.BLOCK_M) * splits, p.kv_heads, p.batch
        first = KernelLaunch(self.name, grid, (threads(genes), 1, 1), smem_bytes(p, genes), args)
        if splits == 1:
            return (first,)
        return first, self.merge_launch(p, results, splits, overlaps=genes.DEPENDENT_LAUNCH)

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        genes = LatentWgmmaGenes.of(config)
        splits, _ = split_of(problem, genes)
        rows = row_blocks(problem, genes.BLOCK_M) * problem.kv_heads * problem.batch * splits * genes.BLOCK_M
        counts = rows // genes.BLOCK_M // splits * 4 if problem.seqused else 0
        return {PARTIAL: rows * problem.head_dim_v * 4, STATE: rows * 8 + counts} if splits > 1 else {}

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, LatentWgmmaGenes.of(config), registers)


def _heads_map(problem: AttentionProblem, heads: int) -> TensorMap:
    """The map of Q whose rows are the heads of one query: all 64-column chunks in one box."""
    batch, all_heads, seqlen, head_dim = problem.shape("q")
    batch_bytes, head_bytes, row_bytes = (stride * problem.element_bytes for stride in problem.strides("q")[:3])
    chunks = head_dim // CHUNK_COLUMNS
    return TensorMap(
        "q",
        problem.dtype,
        (CHUNK_COLUMNS, all_heads, chunks, seqlen, batch),
        (head_bytes, ROW_BYTES, row_bytes, batch_bytes),
        (CHUNK_COLUMNS, heads, chunks, 1, 1),
    )


LEAST_STAGES = 2
"""Q Kᵀ of a tile begins before P V of the one before has ended."""
STEP_COLUMNS = 16
"""Of Q that a product of wgmma takes."""
MOST_KEY_TILES = (1 << 15) - 1
"""`KeyRange` in `key_share.cuh`."""
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
    if genes.OVERLAP and (tiles == 1 or genes.WARPGROUPS == SCORES_ALONE):
        other = (
            "a block takes one tile of keys" if tiles == 1 else "other warpgroups multiply beside the softmax anyway"
        )
        return f"OVERLAP WARPGROUPS={genes.WARPGROUPS}: {other}."
    if genes.RESCALE != "always" and tiles == 1:
        return f"RESCALE={genes.RESCALE}: a block takes one tile of keys, and rescales nothing."
    blocks = row_blocks(problem, genes.BLOCK_M) * problem.kv_heads * problem.batch
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
    """More blocks than a grid has, or more tiles of keys than a word of the scheduler."""
    blocks = row_blocks(problem, genes.BLOCK_M) * split_of(problem, genes)[0]
    if blocks >= 1 << 31:
        return f"SPLITS={genes.SPLITS} make {blocks} blocks, more than a grid has."
    if problem.seqlen_k > MOST_KEY_TILES * genes.BLOCK_N:
        return f"latent_wgmma counts tiles of {genes.BLOCK_N} keys in 15 bits."
    return None
