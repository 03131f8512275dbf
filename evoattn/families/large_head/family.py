"""Attention for a head_dim of hundreds to thousands and few queries: head_dim split over blocks, any GPU of the
table."""

import math
from typing import Any, ClassVar

from evoattn.families.base import Family, attention_args
from evoattn.families.large_head.resources import (
    LargeHeadGenes,
    is_fused,
    is_spread,
    k_bytes,
    launch_work,
    on_tensor_cores,
    packed_rows,
    q_bytes,
    registers_needed,
    slice_elements,
    smem_bytes,
    spread_parts,
    vector_elements,
    warp_output_rows,
    workspace_bytes,
)
from evoattn.families.residency import WARP, why_no_memory, why_too_few_registers
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.launch import KernelLaunch, scratch_args
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, Value

MAX_HEAD_DIM = 8192
MIN_HEAD_DIM = {"fp16": 256, "bf16": 256, "fp32": 32}
"""By dtype: below it other families have tensor cores for 16 bits, but for fp32 this alone has them."""
RECIPE_KEYS = {32: 64, 64: 64, 128: 64, 192: 32, 256: 32}
"""Keys of a tile by head_dim, of rows of the same bits in every batch: what every GPU's shared memory holds."""


class LargeHead(Family):
    """The `Family` of `templates/large_head.cu.j2`: any lengths, grouped heads, three masks, fp16, bf16 and fp32."""

    name: ClassVar[str] = "large_head"
    genes = LargeHeadGenes
    aims = ()
    summary: ClassVar[str] = (
        "a large head_dim and few queries: head_dim split over blocks; CUDA cores, or three tf32 products for fp32"
    )
    devices: ClassVar[str] = "any GPU, sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "fp32")

    def may_win(self, problem: AttentionProblem) -> bool:
        """In 16 bits it won none of 14 recorded problems (landscapes.npz), and was 1.5 to 11 times slower."""
        return problem.dtype == "fp32"

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
        genes = LargeHeadGenes.of(config)
        return (
            why_wrong_shape(problem, genes, gpu)
            or why_too_big(problem, genes, gpu)
            or why_no_memory(problem, self.workspace(problem, config, gpu), gpu)
            or (why_redundant(problem, genes) if redundant else None)
        )

    def recipe(self, problem: AttentionProblem, gpu: GpuSpec) -> dict[str, Value]:
        if not has_recipe(problem):
            return {}
        return {"BLOCK_N": RECIPE_KEYS[problem.head_dim], "MATH": "tf32x3", "EXCHANGE": "none"}

    def row_bits(self, problem: AttentionProblem, config: KernelConfig) -> tuple[Value, ...] | None:
        """A row meets its tiles of keys from the first to the last: products are added up over the dimensions, then
        over the keys of a tile, in their order, whatever rows and columns a warp has. Tiles in which it sees no key
        multiply by 1 and add 0."""
        genes = LargeHeadGenes.of(config)
        return genes.BLOCK_N, genes.MATH, genes.EXCHANGE

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = LargeHeadGenes.of(config)
        scores_smem, smem = smem_bytes(problem, genes)
        return {
            "Q_IN_SHARED": genes.Q_PLACE == "shared",
            "SCORES_SMEM_BYTES": scores_smem,
            "SMEM_BYTES": smem,
            "CLUSTER_DIMS": f"__cluster_dims__({genes.DIM_SPLIT}, 1, 1)" if genes.EXCHANGE == "cluster" else "",
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        """A block for each slice of head_dim of each tile of rows; with a workspace, before that one for each tile of
        keys of each too."""
        genes = LargeHeadGenes.of(config)
        split, block = genes.DIM_SPLIT, (WARP * genes.WARPS, 1, 1)
        x, z = math.ceil(packed_rows(problem) / genes.BLOCK_M) * split, problem.kv_heads * problem.batch
        scores_smem, smem = smem_bytes(problem, genes)
        cluster = (split if genes.EXCHANGE == "cluster" else 1, 1, 1)
        args = *attention_args(problem), *scratch_args(workspace_bytes(problem, genes), "partials")
        if is_fused(genes):
            return (KernelLaunch("large_head", (x, 1, z), block, smem, args, cluster),)
        key_tiles = math.ceil(problem.seqlen_k / genes.BLOCK_N)
        return (
            KernelLaunch("large_head_scores", (x, key_tiles, z), block, scores_smem, args),
            KernelLaunch("large_head", (x, 1, z), block, smem, args, overlaps=genes.DEPENDENT_LAUNCH),
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        genes = LargeHeadGenes.of(config)
        return workspace_bytes(problem, genes)

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, LargeHeadGenes.of(config), registers)


def has_recipe(problem: AttentionProblem) -> bool:
    """Whether rows of the same bits in every batch are this family's: fp32 whose columns are whole products of tensor
    cores."""
    return problem.dtype == "fp32" and problem.head_dim in RECIPE_KEYS


MAX_CLUSTER = 8
"""Blocks in a cluster that every device of sm_90 takes (CUDA C++ Programming Guide, thread block clusters)."""
MAX_WORKSPACE_BYTES = 1 << 30
"""Partial scores in global memory: beyond it another family is the right one."""


def _why_wrong_products(problem: AttentionProblem, genes: LargeHeadGenes) -> str | None:
    """Tiles that the chosen arithmetic does not have."""
    rows, keys, value_threads, piece = (
        genes.SCORE_ROWS,
        genes.SCORE_KEYS,
        genes.VALUE_THREADS,
        slice_elements(problem, genes),
    )
    if not on_tensor_cores(genes):
        if max(rows, keys) <= 8:
            return None
        return f"Score tiles of SCORE_ROWS={rows} by SCORE_KEYS={keys} are for MATH=tf32x3; those of fma end at 8 by 8."
    if problem.dtype != "fp32":
        return f"MATH={genes.MATH} makes fp32 of three tf32 products, and {problem.dtype} needs but one of its own."
    if rows % 16 or keys % 8 or genes.LANES != WARP:
        return (
            f"MATH=tf32x3 takes score tiles of 16 rows by 8 keys or more and LANES=32, not {rows} by {keys} and "
            f"LANES={genes.LANES}."
        )
    output_rows = warp_output_rows(genes)
    if output_rows % 16 or output_rows == 0:
        return (
            f"MATH=tf32x3 gives a warp 16 output rows or more, and VALUE_THREADS={value_threads} leave it "
            f"{output_rows}."
        )
    if piece % max(value_threads, WARP) or value_threads < WARP:
        return (
            f"MATH=tf32x3 gives a warp runs of 32 columns, and VALUE_THREADS={value_threads} do not share a slice of "
            f"{piece} so."
        )
    return None


def _why_not_spread(problem: AttentionProblem, genes: LargeHeadGenes) -> str | None:
    """Tiles and slices whose warps cannot share head_dim."""
    rows, keys, piece, parts = (genes.SCORE_ROWS, genes.SCORE_KEYS, slice_elements(problem, genes), spread_parts(genes))
    if parts < 2:
        return (
            f"MATH=tf32x3_spread shares score tiles between warps; WARPS={genes.WARPS} are too few for tiles of {rows} "
            f"by {keys}."
        )
    if genes.Q_PLACE == "shared":
        return (
            "MATH=tf32x3_spread reads Q right into the registers of the warps that want it: Q_PLACE=shared would be a "
            "detour."
        )
    if piece % (16 * parts):
        return (
            f"MATH=tf32x3_spread gives a warp steps of 16 dimensions, and {parts} warps do not share a slice of "
            f"{piece} so."
        )
    return None


def why_wrong_shape(problem: AttentionProblem, genes: LargeHeadGenes, gpu: GpuSpec) -> str | None:
    """Slices, score tiles and output tiles that are not whole, and exchanges that are not there."""
    block_m, block_n, split, exchange = (genes.BLOCK_M, genes.BLOCK_N, genes.DIM_SPLIT, genes.EXCHANGE)
    rows, keys, lanes, threads = genes.SCORE_ROWS, genes.SCORE_KEYS, genes.LANES, WARP * genes.WARPS
    if problem.head_dim % (split * vector_elements(problem)):
        return (
            f"DIM_SPLIT={split} does not divide head_dim {problem.head_dim} into whole vectors of "
            f"{vector_elements(problem)} elements."
        )
    if (split == 1) != (exchange == "none") and exchange != "workspace":
        return (
            f"EXCHANGE={exchange} does not go with DIM_SPLIT={split}: one block has nothing to exchange, several must."
        )
    if genes.DEPENDENT_LAUNCH and exchange != "workspace":
        return f"DEPENDENT_LAUNCH lets a second launch begin early, and EXCHANGE={exchange} has one."
    if genes.DEPENDENT_LAUNCH and gpu.capability < (9, 0):
        return f"DEPENDENT_LAUNCH needs the dependent launches of sm_90, and {gpu.name} is {gpu.arch}."
    if exchange == "cluster" and gpu.capability < (9, 0):
        return f"EXCHANGE=cluster needs the clusters of sm_90, and {gpu.name} is {gpu.arch}."
    if exchange == "cluster" and split > MAX_CLUSTER:
        return f"DIM_SPLIT={split} is more than the {MAX_CLUSTER} blocks that a cluster may have on every device."
    if reason := _why_wrong_products(problem, genes):
        return reason
    if block_m % rows or block_n % keys:
        return (
            f"Score tiles of SCORE_ROWS={rows} by SCORE_KEYS={keys} do not tile BLOCK_M={block_m} by BLOCK_N={block_n}."
        )
    if is_spread(genes) and (reason := _why_not_spread(problem, genes)):
        return reason
    tiles = block_m // rows * (block_n // keys)
    if tiles % (WARP // lanes):
        return (
            f"{tiles} score tiles of {rows} by {keys} do not fill whole warps of {WARP // lanes} groups of "
            f"LANES={lanes}."
        )
    if not on_tensor_cores(genes) and slice_elements(problem, genes) // vector_elements(problem) < lanes:
        return (
            f"LANES={lanes} lanes share the {slice_elements(problem, genes) // vector_elements(problem)} vectors of a "
            "slice: some never have one."
        )
    if threads % genes.VALUE_THREADS or block_m % (threads // genes.VALUE_THREADS):
        return (
            f"BLOCK_M={block_m} rows do not divide over {threads} threads, VALUE_THREADS={genes.VALUE_THREADS} per row."
        )
    if (
        not on_tensor_cores(genes)
        and 2 * (slice_elements(problem, genes) // vector_elements(problem)) <= genes.VALUE_THREADS
    ):
        return (
            f"VALUE_THREADS={genes.VALUE_THREADS} for a slice of {slice_elements(problem, genes)} elements leave half "
            "of them or more idle."
        )
    return None


def why_too_big(problem: AttentionProblem, genes: LargeHeadGenes, gpu: GpuSpec) -> str | None:
    """Shared memory, workspace, grid and registers, with what they would take."""
    smem = max(smem_bytes(problem, genes))
    if smem > gpu.smem_per_block:
        return (
            f"Shared memory would take {smem} bytes, {q_bytes(problem, genes)} of them for BLOCK_M={genes.BLOCK_M} "
            f"rows of Q and {k_bytes(problem, genes)} for each tile of K and V, STAGES={genes.STAGES}; {gpu.name} "
            f"gives a block {gpu.smem_per_block}."
        )
    scratch = sum(workspace_bytes(problem, genes).values())
    if scratch > MAX_WORKSPACE_BYTES:
        return (
            f"The partial scores of DIM_SPLIT={genes.DIM_SPLIT} slices would take {scratch} bytes, over "
            f"{MAX_WORKSPACE_BYTES}."
        )
    if not is_fused(genes) and math.ceil(problem.seqlen_k / genes.BLOCK_N) > MAX_GRID_YZ:
        return f"EXCHANGE=workspace puts the tiles of {problem.seqlen_k} keys in grid y, which ends at {MAX_GRID_YZ}."
    return why_too_few_registers(1, genes.WARPS, registers_needed(problem, genes))


def why_redundant(problem: AttentionProblem, genes: LargeHeadGenes) -> str | None:
    """Configs that do what a smaller one does."""
    block_m, block_n, stages = genes.BLOCK_M, genes.BLOCK_N, genes.STAGES
    if block_m >= 2 * packed_rows(problem):
        return f"BLOCK_M={block_m} for {packed_rows(problem)} rows leaves half of the block or more without work."
    if block_n > 4 and block_n >= 2 * problem.seqlen_k:
        return f"BLOCK_N={block_n} for {problem.seqlen_k} keys leaves half of the tile or more without work."
    if stages > math.ceil(problem.seqlen_k / block_n):
        return f"STAGES={stages} is more than the tiles of {block_n} that {problem.seqlen_k} keys make."
    tensor = on_tensor_cores(genes)
    steps = (
        slice_elements(problem, genes) // 16
        if tensor
        else math.ceil(slice_elements(problem, genes) // vector_elements(problem) / genes.LANES)
    )
    trips = max(steps, block_n // (8 if tensor else 4))
    if 2 * trips <= genes.UNROLL:
        return f"UNROLL={genes.UNROLL} changes nothing: the loops make at most {trips} trips."
    return None
