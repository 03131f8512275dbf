"""Attention in three launches: Q Kᵀ into a scratch buffer, softmax over its rows, P V; tensor cores, sm_80 and
newer."""

import math
from typing import Any, ClassVar

from evoattn.families.base import Family, softmax_scale_log2
from evoattn.families.flash_wgmma.text import wgmma_function
from evoattn.families.residency import WARP, register_cap, why_no_memory
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ELEMENT_BYTES, tile_map
from evoattn.families.three_kernel.resources import (
    ThreeKernelGenes,
    exponents_late,
    has_tile_softmax,
    launch_work,
    may_overlap,
    merges_late,
    registers_needed,
    scores_smem_bytes,
    threads_a_block,
    uses_wgmma,
    values_smem_bytes,
)
from evoattn.families.work import LaunchWork
from evoattn.model.dtype import DTYPES
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar, TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MAX_ROWS = 2**31 - 1
"""Rows of S count in an int."""
LEAST_ROWS = 16
"""Of a tile of queries."""


def score_stride(problem: AttentionProblem) -> int:
    """Elements from one row of S or P to the next: whole 16-byte chunks of 16-bit elements."""
    return math.ceil(problem.seqlen_k / 8) * 8


def query_rows(problem: AttentionProblem) -> int:
    return problem.batch * problem.heads * problem.seqlen_q


def _references(problem: AttentionProblem, genes: ThreeKernelGenes) -> int:
    """Partial maxima per row, one per key warp."""
    return math.ceil(problem.seqlen_k / (genes.BLOCK_N // genes.WARPS_N))


def _wgmma_functions(problem: AttentionProblem, genes: ThreeKernelGenes) -> str:
    if not uses_wgmma(genes):
        return ""
    qk = wgmma_function("wgmma_qk", genes.BLOCK_N, problem.dtype, a_in_registers=False, b_transposed=False)
    return f"{qk}\n\n" + wgmma_function(
        "wgmma_pv", problem.head_dim, problem.dtype, a_in_registers=False, b_transposed=True
    )


def _score_map(problem: AttentionProblem, buffer: str, dtype: str, columns: int) -> TensorMap:
    """The map of chunks of 64 rows of S or P, of whose rows the first `columns` count."""
    row = score_stride(problem) * ELEMENT_BYTES
    shape = (columns, problem.seqlen_q, problem.heads, problem.batch)
    strides_bytes = (row, row * problem.seqlen_q, row * problem.seqlen_q * problem.heads)
    return TensorMap(buffer, dtype, shape, strides_bytes, (CHUNK_COLUMNS, CHUNK_COLUMNS, 1, 1))


class ThreeKernel(Family):
    """The `Family` of `templates/three_kernel.cu.j2`."""

    name: ClassVar[str] = "three_kernel"
    genes = ThreeKernelGenes
    summary: ClassVar[str] = "QKᵀ, softmax and PV in three launches, S and P in device memory; fp16 and bf16"
    devices: ClassVar[str] = "sm_80 and newer"

    def may_win(self, problem: AttentionProblem) -> bool:
        """It has won no measured problem."""
        return False

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if reason := (
            self.why_too_old(gpu)
            or self.why_no_head_dim(MIN_HEAD_DIM, MAX_HEAD_DIM, problem.head_dim)
            or self.why_past_grid(problem.heads * problem.batch, "heads over all batches")
            or self.why_past_grid(math.ceil(problem.seqlen_q / LEAST_ROWS), f"tiles of {LEAST_ROWS} queries")
        ):
            return reason
        if query_rows(problem) > MAX_ROWS:
            return (
                f"three_kernel takes at most {MAX_ROWS} queries over all heads and batches, not {query_rows(problem)}."
            )
        return None

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        # Whatever `redundant` says: its scratch grows with the lengths, so that it is no kernel for other problems.
        genes = ThreeKernelGenes.of(config)
        return (
            why_wrong_shape(genes)
            or why_not_wgmma(genes, gpu)
            or why_no_overlap(genes, gpu)
            or why_wrong_scores(problem, genes)
            or why_redundant(problem, genes)
            or why_too_big(problem, genes, gpu)
            or why_no_memory(problem, self.workspace(problem, config, gpu), gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = ThreeKernelGenes.of(config)
        return {
            "WGMMA_FUNCTIONS": _wgmma_functions(problem, genes),
            "SCORE": DTYPES[problem.dtype if has_tile_softmax(genes) else genes.S_TYPE].cuda,
            "EXPONENTS_LATE": exponents_late(genes),
            "TILE_SOFTMAX": has_tile_softmax(genes),
            "MERGE_LATE": merges_late(genes),
            "ZIGZAG": genes.HEAD_ORDER == "zigzag",
            "DEPENDENT_LAUNCH": may_overlap(genes),
            "TRIGGER_LATE": genes.DEPENDENT_LAUNCH == "late",
            "SCORES_SMEM_BYTES": scores_smem_bytes(problem, genes),
            "VALUES_SMEM_BYTES": values_smem_bytes(problem, genes),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes = ThreeKernelGenes.of(config)
        heads = problem.heads * problem.batch
        key_blocks = math.ceil(problem.seqlen_k / (genes.BLOCK_N * genes.TILES_A_BLOCK))
        scores_grid = (key_blocks, math.ceil(problem.seqlen_q / genes.BLOCK_M), heads)
        stride = Scalar("int32", score_stride(problem))
        lengths = tuple(Scalar("int32", n) for n in (problem.seqlen_q, problem.seqlen_k))
        p = Buffer("p" if genes.P_PLACE == "own" else "s")
        # Where there are none of tiles or rows the kernels take the other's pointer and leave it.
        tiles = Buffer("tiles" if has_tile_softmax(genes) else "rows")
        rows = tiles if merges_late(genes) else Buffer("rows")

        def heads_and_lengths(*tensors: str) -> tuple[KernelArg, ...]:
            strides = (Scalar("int64", stride) for t in tensors for stride in problem.strides(t)[:3])
            return *(Scalar("int32", n) for n in (problem.heads, problem.kv_heads)), *lengths, stride, *strides

        threads = tuple((count, 1, 1) for count in threads_a_block(genes))
        scale = softmax_scale_log2(problem)
        scores_args: tuple[KernelArg, ...] = (
            Buffer("q"),
            Buffer("k"),
            Buffer("s"),
            tiles,
            *heads_and_lengths("q", "k"),
            scale,
        )
        values_args: tuple[KernelArg, ...] = (p, tiles, rows, Buffer("v"), Buffer("o"), *heads_and_lengths("v", "o"))
        if uses_wgmma(genes):
            counts = (*(Scalar("int32", n) for n in (problem.heads, problem.kv_heads)), *lengths)
            s_map = _score_map(
                problem, "s", problem.dtype if has_tile_softmax(genes) else genes.S_TYPE, score_stride(problem)
            )
            scores_args = (
                tile_map(problem, "q", CHUNK_COLUMNS),
                tile_map(problem, "k", genes.BLOCK_N),
                s_map,
                tiles,
                *counts,
                scale,
            )
            values_args = (
                _score_map(problem, p.name, problem.dtype, problem.seqlen_k),
                tile_map(problem, "v", genes.PV_BLOCK_K),
                tiles,
                rows,
                Buffer("o"),
                *counts,
                *(Scalar("int64", stride) for stride in problem.strides("o")[:3]),
            )
        softmax_args: tuple[KernelArg, ...] = (rows, Scalar("int32", query_rows(problem)), *lengths)
        softmax_args = (tiles, *softmax_args) if has_tile_softmax(genes) else (Buffer("s"), p, *softmax_args, stride)
        softmax_grid = (math.ceil(query_rows(problem) / genes.ROWS_PER_BLOCK), 1, 1)
        values_grid = (math.ceil(problem.seqlen_q / genes.PV_BLOCK_M), heads, 1)
        scores = KernelLaunch(
            "three_kernel_scores", scores_grid, threads[0], scores_smem_bytes(problem, genes), scores_args
        )
        overlaps = may_overlap(genes)
        softmax = KernelLaunch("three_kernel_softmax", softmax_grid, threads[1], 0, softmax_args, overlaps=overlaps)
        values_smem = values_smem_bytes(problem, genes)
        values = KernelLaunch(
            "three_kernel_values", values_grid, threads[2], values_smem, values_args, overlaps=overlaps
        )
        return (scores, values) if merges_late(genes) else (scores, softmax, values)

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        """S, P unless it replaces S, and two floats per row, maximum and sum; with tiles those of every tile of a row
        too, with tiles_late these alone."""
        genes = ThreeKernelGenes.of(config)
        scores = query_rows(problem) * score_stride(problem)
        own = {"p": scores * ELEMENT_BYTES} if genes.P_PLACE == "own" else {}
        tiles = {"tiles": 8 * query_rows(problem) * _references(problem, genes)} if has_tile_softmax(genes) else {}
        rows = {} if merges_late(genes) else {"rows": 8 * query_rows(problem)}
        return {"s": scores * DTYPES[genes.S_TYPE].bytes, **own, **tiles, **rows}

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, ThreeKernelGenes.of(config), registers)


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
