"""Why a config of three_kernel cannot be, or is redundant, in one sentence each."""

from __future__ import annotations

import math

from evoattn.families.residency import WARP, register_cap
from evoattn.families.tensor_tiles import CHUNK_COLUMNS
from evoattn.families.three_kernel.genes import ThreeKernelGenes
from evoattn.families.three_kernel.resources import (
    exponents_late,
    has_tile_softmax,
    may_overlap,
    merges_late,
    registers_needed,
    scores_smem_bytes,
    threads_a_block,
    uses_wgmma,
    values_smem_bytes,
)
from evoattn.model.dtype import DTYPES
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem


def why_too_big(problem: AttentionProblem, genes: ThreeKernelGenes, gpu: GpuSpec) -> str | None:
    """Shared memory and registers of the three blocks against the limits of the GPU."""
    for what, bytes_, names in (
        ("Q Kᵀ", scores_smem_bytes(problem, genes), ("BLOCK_M", "BLOCK_N")),
        ("P V", values_smem_bytes(problem, genes), ("PV_BLOCK_M", "PV_BLOCK_K", "PV_STAGES")),
    ):
        if bytes_ > gpu.smem_per_block:
            tile = " ".join(f"{name}={genes.value(name)}" for name in names)
            return (
                f"{what} with {tile} needs {bytes_} bytes of shared memory; {gpu.name} gives a block "
                f"{gpu.smem_per_block}."
            )
    for what, (needed, threads) in zip(
        ("Q Kᵀ", "softmax", "P V"), zip(registers_needed(problem, genes), threads_a_block(genes))
    ):
        cap = register_cap(math.ceil(threads / WARP), 1)
        if needed > cap:
            return (
                f"A thread of {what} needs about {needed} registers, and a block of {threads} threads leaves it {cap}."
            )
    return None


MAX_THREADS = 1024
WGMMA_ARCH = "sm_90a"
DEPENDENT_CAPABILITY = (9, 0)
"""From which on a launch may begin before the one before it has ended (CUDA C++ Programming Guide, programmatic
dependent launch)."""
KEY_GROUP = 32
"""Keys of a warp are stored in groups of four n8 tiles, eight neighbours a lane."""


def why_wrong_shape(genes: ThreeKernelGenes) -> str | None:
    """Tiles that are not whole mma tiles of each warp."""
    for rows, warps in (("BLOCK_M", "WARPS_M"), ("PV_BLOCK_M", "PV_WARPS")):
        if genes.number(rows) % (16 * genes.number(warps)):
            return (
                f"{rows}={genes.number(rows)} queries do not divide into tiles of 16 for {warps}={genes.number(warps)}."
            )
    if genes.BLOCK_N % (KEY_GROUP * genes.WARPS_N):
        return f"BLOCK_N={genes.BLOCK_N} keys do not divide into groups of {KEY_GROUP} for WARPS_N={genes.WARPS_N}."
    scores, softmax, _ = threads_a_block(genes)
    if scores > MAX_THREADS:
        return f"WARPS_M={genes.WARPS_M} times WARPS_N={genes.WARPS_N} are over the {MAX_THREADS} threads of a block."
    if softmax % WARP or softmax > MAX_THREADS:
        return (
            f"THREADS_PER_ROW={genes.THREADS_PER_ROW} times ROWS_PER_BLOCK={genes.ROWS_PER_BLOCK} are {softmax} "
            f"threads: a block has whole warps, at most {MAX_THREADS} threads."
        )
    return None


def why_not_wgmma(genes: ThreeKernelGenes, gpu: GpuSpec) -> str | None:
    """What PRODUCT=wgmma cannot do, and genes that it leaves nothing to do."""
    if not uses_wgmma(genes):
        return None if genes.TILES_A_BLOCK == 1 else "PRODUCT=mma makes a tile of S per block: TILES_A_BLOCK must be 1."
    if gpu.arch != WGMMA_ARCH:
        return f"PRODUCT=wgmma needs {WGMMA_ARCH}, and {gpu.name} is {gpu.arch}."
    for gene in ("BLOCK_M", "BLOCK_N", "PV_BLOCK_M", "PV_BLOCK_K"):
        if genes.number(gene) % CHUNK_COLUMNS:
            return (
                f"{gene}={genes.number(gene)} is no multiple of {CHUNK_COLUMNS}, the rows of a wgmma and the columns "
                "of a tensor copy."
            )
    for rows, warps in (("BLOCK_M", "WARPS_M"), ("PV_BLOCK_M", "PV_WARPS")):
        if genes.number(warps) != genes.number(rows) // 16:
            return (
                f"A warp has 16 rows of a wgmma: {rows}={genes.number(rows)} needs {warps}={genes.number(rows) // 16}, "
                f"not {genes.number(warps)}."
            )
    if genes.WARPS_N > 1 or genes.BLOCK_K > 32:
        return "PRODUCT=wgmma takes a tile of S at once: WARPS_N and BLOCK_K must be 1 and 32, to do nothing."
    if exponents_late(genes) or genes.S_TYPE == "fp32":
        return (
            "PRODUCT=wgmma moves S and P by tensor copies in 16 bits: SOFTMAX must not be statistics, nor S_TYPE fp32."
        )
    return None


def why_no_overlap(genes: ThreeKernelGenes, gpu: GpuSpec) -> str | None:
    if may_overlap(genes) and gpu.capability < DEPENDENT_CAPABILITY:
        return (
            f"DEPENDENT_LAUNCH={genes.DEPENDENT_LAUNCH} needs griddepcontrol of sm_90 and newer, and {gpu.name} is "
            f"{gpu.arch}."
        )
    return None


def why_wrong_scores(problem: AttentionProblem, genes: ThreeKernelGenes) -> str | None:
    """Types and places of S and P that lose too much, overlap or do nothing."""
    s_type = genes.S_TYPE
    if has_tile_softmax(genes):
        return _why_wrong_tiles(genes)
    if genes.THREADS_PER_ROW == 1:
        return f"SOFTMAX={genes.SOFTMAX} reads whole rows: THREADS_PER_ROW must be over 1."
    if s_type == "bf16" and problem.dtype == "fp16":
        return "S_TYPE=bf16 keeps 8 bits of a score, and an fp16 answer shows the loss of the other 3."
    if exponents_late(genes) and s_type == "fp32":
        return "SOFTMAX=statistics feeds S to the tensor cores' registers in pairs of 16 bits: S_TYPE must not be fp32."
    if exponents_late(genes) and genes.P_PLACE == "own":
        return "SOFTMAX=statistics writes no P: P_PLACE must be in_place, to do nothing."
    if s_type == "fp32" and genes.P_PLACE == "in_place":
        return (
            "P_PLACE=in_place needs S of 16 bits: over S_TYPE=fp32 a probability would fall on scores that are not "
            "read yet."
        )
    if genes.VECTOR_WIDTH * DTYPES[s_type].bytes > 16:
        return f"VECTOR_WIDTH={genes.VECTOR_WIDTH} scores of S_TYPE={s_type} are more than the 16 bytes of a load."
    return None


def _why_wrong_tiles(genes: ThreeKernelGenes) -> str | None:
    """What SOFTMAX=tiles and tiles_late cannot do, and genes that they leave nothing to do."""
    unused = {"S_TYPE": "fp16", "P_PLACE": "in_place", "THREADS_PER_ROW": 1, "VECTOR_WIDTH": 4, "KEPT_VECTORS": 1}
    if merges_late(genes):
        unused["ROWS_PER_BLOCK"] = 32
    for gene, value in unused.items():
        if genes.value(gene) != value:
            return (
                f"SOFTMAX={genes.SOFTMAX} writes no S and merges a row in one thread: {gene} must be {value}, to do "
                "nothing."
            )
    if (keys := genes.BLOCK_N // genes.WARPS_N) % genes.PV_BLOCK_K:
        return (
            f"PV_BLOCK_K={genes.PV_BLOCK_K} keys do not divide the {keys} keys of a row that a warp of Q Kᵀ refers to "
            "one maximum."
        )
    return None


def why_redundant(problem: AttentionProblem, genes: ThreeKernelGenes) -> str | None:
    """Configs that do on this problem what a smaller one does."""
    for gene, least, count, what in (
        ("BLOCK_M", 32, problem.seqlen_q, "queries"),
        ("PV_BLOCK_M", 16, problem.seqlen_q, "queries"),
        ("BLOCK_N", 32, problem.seqlen_k, "keys"),
        ("PV_BLOCK_K", 32, problem.seqlen_k, "keys"),
        ("BLOCK_K", 32, problem.head_dim, "columns"),
    ):
        if genes.number(gene) > least and genes.number(gene) >= 2 * count:
            return f"{gene}={genes.number(gene)} for {count} {what} leaves half of the tile or more without work."
    if genes.BLOCK_K > 32 and problem.head_dim <= genes.BLOCK_K // 2:
        return f"BLOCK_K={genes.BLOCK_K} is all {problem.head_dim} columns, as {genes.BLOCK_K // 2} is."
    if (count := genes.TILES_A_BLOCK) > 1 and count // 2 * genes.BLOCK_N >= problem.seqlen_k:
        return (
            f"TILES_A_BLOCK={count} is more than the tiles of {genes.BLOCK_N} keys that {problem.seqlen_k} keys fill."
        )
    steps = math.ceil(problem.seqlen_k / genes.PV_BLOCK_K)
    if max(2, steps) < genes.PV_STAGES:
        return f"PV_STAGES={genes.PV_STAGES} is more than the {steps} steps of {genes.PV_BLOCK_K} keys."
    threads, width, kept = genes.THREADS_PER_ROW, genes.VECTOR_WIDTH, genes.KEPT_VECTORS
    if threads > WARP and (threads // 2) * width >= problem.seqlen_k:
        return (
            f"THREADS_PER_ROW={threads} with VECTOR_WIDTH={width} leave half of the threads without one of the "
            f"{problem.seqlen_k} keys."
        )
    if kept > 1 and kept // 2 * threads * width >= problem.seqlen_k:
        return (
            f"KEPT_VECTORS={kept} is more than the vectors that {problem.seqlen_k} keys give each of {threads} threads."
        )
    return None
