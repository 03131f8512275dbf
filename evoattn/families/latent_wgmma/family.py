"""Attention over a latent cache on Hopper, whose V is the first columns of K: a tile of K is loaded once and used
twice; sm_90a only."""

from __future__ import annotations

from typing import Any, ClassVar

from evoattn.families.base import Family, softmax_scale_log2
from evoattn.families.flash_wgmma.text import wgmma_function
from evoattn.families.latent import ARCH, apart_constants, key_maps, row_blocks, why_not_latent
from evoattn.families.latent_wgmma.resources import (
    PRODUCER_REGISTERS,
    REGISTERS,
    LatentWgmmaGenes,
    launch_work,
    merge_smem_bytes,
    registers_needed,
    smem_bytes,
    split_of,
    threads,
    value_columns,
)
from evoattn.families.merge_work import MERGE_THREADS
from evoattn.families.residency import why_no_memory
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ROW_BYTES
from evoattn.families.variants import variant_args, variant_constants
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar, TensorMap
from evoattn.model.mask import FULL_AND_CAUSAL
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.model.variant import KEY_VARIANTS, ROTARY_APART

RESCALES = {"always": ("ALWAYS", 0), "lazy_5": ("LAZY", 5), "lazy_8": ("LAZY", 8)}
PARTIAL, STATE = "partial", "state"
"""Scratch buffers: O of each split before the division, fp32, and two floats per row, its shift and its sum."""


class LatentWgmma(Family):
    """The `Family` of `templates/latent_wgmma.cu.j2`."""

    name: ClassVar[str] = "latent_wgmma"
    summary: ClassVar[str] = "Hopper's wgmma over a latent cache, whose V is the first columns of K; fp16 and bf16"
    devices: ClassVar[str] = ARCH
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16")
    masks: ClassVar[tuple[str, ...]] = FULL_AND_CAUSAL
    writes_lse: ClassVar[bool] = True
    variants: ClassVar[tuple[str, ...]] = ("value_dim", "shared_kv", ROTARY_APART, *KEY_VARIANTS)
    plain: ClassVar[bool] = False
    weighed_as: ClassVar[str] = "flash_wgmma"
    heads_are_rows: ClassVar[bool] = True

    def genes(self, config: KernelConfig) -> LatentWgmmaGenes:
        return LatentWgmmaGenes.of(config)

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        return why_not_latent(self.name, problem, gpu, 2 * CHUNK_COLUMNS)

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = self.genes(config)
        return (
            why_too_big(problem, genes, gpu)
            or why_too_long(problem, genes)
            or why_no_memory(problem, self.workspace(problem, config, gpu), gpu)
            or (why_redundant(problem, genes, gpu) if redundant else None)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = self.genes(config)
        rescale, octaves = RESCALES[genes.RESCALE]
        columns, dtype = value_columns(problem, genes), problem.dtype
        return {
            "ELEMENT": problem.element.cuda,
            "HEAD_DIM": problem.head_dim,
            "VALUE_DIM": problem.head_dim_v,
            **problem.masking.constants(),
            **variant_constants(problem),
            **apart_constants(problem),
            "RESCALE": rescale,
            "LAZY_OCTAVES": octaves,
            "PRODUCER_REGISTERS": PRODUCER_REGISTERS,
            "SCORE_REGISTERS": REGISTERS[genes.WARPGROUPS][0],
            "OUTPUT_REGISTERS": REGISTERS[genes.WARPGROUPS][1],
            "SMEM_BYTES": smem_bytes(problem, genes),
            "PV_COLUMNS": columns,
            "WRITE_LSE": problem.lse,
            "MERGE_SMEM_BYTES": merge_smem_bytes(problem),
            "MERGE_THREADS": MERGE_THREADS,
            "WGMMA_QK": wgmma_function("wgmma_qk", genes.BLOCK_N, dtype, a_in_registers=False, b_transposed=False),
            "WGMMA_QK_REGISTERS": wgmma_function(
                "wgmma_qk_registers", genes.BLOCK_N, dtype, a_in_registers=True, b_transposed=False
            ),
            "WGMMA_PV": wgmma_function("wgmma_pv", columns, dtype, a_in_registers=True, b_transposed=True),
            "WGMMA_PV_SHARED": wgmma_function(
                "wgmma_pv_shared", columns, dtype, a_in_registers=False, b_transposed=True
            ),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = self.genes(config)
        splits, split_tiles = split_of(problem, genes)
        o_strides = tuple(Scalar("int64", stride) for stride in problem.strides("o")[:3])
        p, null = problem, Scalar("int64", 0)
        partials: tuple[KernelArg, ...] = (Buffer(PARTIAL), Buffer(STATE)) if splits > 1 else (null, null)
        lse: KernelArg = Buffer("lse") if p.lse else null
        sizes = p.kv_heads, p.seqlen_q, p.seqlen_k, p.group_size, splits, split_tiles
        args: tuple[KernelArg, ...] = (
            _heads_map(problem, genes.BLOCK_M),
            *key_maps(problem, genes.BLOCK_N),
            Buffer("o"),
            lse,
            *partials,
            *(Scalar("int32", size) for size in sizes),
            *o_strides,
            softmax_scale_log2(problem),
            *variant_args(problem),
        )
        grid = row_blocks(problem, genes.BLOCK_M) * splits, p.kv_heads, p.batch
        first = KernelLaunch(self.name, grid, (threads(genes), 1, 1), smem_bytes(problem, genes), args)
        if splits == 1:
            return (first,)
        args = (
            Buffer("o"),
            lse,
            *partials,
            *(Scalar("int32", size) for size in (p.kv_heads, p.seqlen_q, p.group_size, splits)),
            *o_strides,
        )
        grid = p.seqlen_q * p.group_size, p.kv_heads, p.batch
        merge_smem = merge_smem_bytes(problem)
        return first, KernelLaunch(
            f"{self.name}_merge", grid, (MERGE_THREADS, 1, 1), merge_smem, args, overlaps=genes.DEPENDENT_LAUNCH
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        genes = self.genes(config)
        splits, _ = split_of(problem, genes)
        rows = row_blocks(problem, genes.BLOCK_M) * problem.kv_heads * problem.batch * splits * genes.BLOCK_M
        counts = rows // genes.BLOCK_M // splits * 4 if problem.seqused else 0
        return {PARTIAL: rows * problem.head_dim_v * 4, STATE: rows * 8 + counts} if splits > 1 else {}

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, self.genes(config), registers)


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
    """More blocks than a grid has."""
    blocks = row_blocks(problem, genes.BLOCK_M) * split_of(problem, genes)[0]
    if blocks >= 1 << 31:
        return f"SPLITS={genes.SPLITS} make {blocks} blocks, more than a grid has."
    return None
