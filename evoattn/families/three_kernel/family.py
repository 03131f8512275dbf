"""Attention in three launches: Q Kᵀ into a scratch buffer, softmax over its rows, P V; tensor cores, sm_80 and
newer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import Family, softmax_scale_log2
from evoattn.families.flash_wgmma.text import wgmma_function
from evoattn.families.residency import why_no_memory
from evoattn.families.tensor_tiles import CHUNK_COLUMNS, ELEMENT_BYTES, tile_map
from evoattn.families.three_kernel.genes import ThreeKernelGenes
from evoattn.families.three_kernel.refusals import (
    why_no_overlap,
    why_not_wgmma,
    why_redundant,
    why_too_big,
    why_wrong_scores,
    why_wrong_shape,
)
from evoattn.families.three_kernel.resources import (
    exponents_late,
    has_tile_softmax,
    may_overlap,
    merges_late,
    scores_smem_bytes,
    threads_a_block,
    uses_wgmma,
    values_smem_bytes,
)
from evoattn.families.three_kernel.work import launch_work
from evoattn.families.work import LaunchWork
from evoattn.model.dtype import DTYPES
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar, TensorMap
from evoattn.model.mask import FULL_AND_CAUSAL
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
MAX_ROWS = 2**31 - 1
"""Rows of S count in an int."""


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
    summary: ClassVar[str] = "QKᵀ, softmax and PV in three launches, S and P in device memory; fp16 and bf16"
    devices: ClassVar[str] = "sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16")
    masks: ClassVar[tuple[str, ...]] = FULL_AND_CAUSAL

    def genes(self, config: KernelConfig) -> ThreeKernelGenes:
        return ThreeKernelGenes.of(config)

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if gpu.capability < (8, 0):
            return f"three_kernel needs mma.m16n8k16 and cp.async of sm_80 and newer, and {gpu.name} is {gpu.arch}."
        if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
            return f"three_kernel takes a head_dim of {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {problem.head_dim}."
        if problem.heads * problem.batch > MAX_GRID_YZ:
            return (
                f"three_kernel takes at most {MAX_GRID_YZ} heads over all batches (grid y and z), not "
                f"{problem.heads * problem.batch}."
            )
        if query_rows(problem) > MAX_ROWS:
            return (
                f"three_kernel takes at most {MAX_ROWS} queries over all heads and batches, not {query_rows(problem)}."
            )
        return None

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        # Whatever `redundant` says: its scratch grows with the lengths, so that it is no kernel for other problems.
        genes = self.genes(config)
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
        genes = self.genes(config)
        same = (
            "PRODUCT", "BLOCK_M", "BLOCK_N", "BLOCK_K", "WARPS_M", "WARPS_N", "TILES_A_BLOCK", "THREADS_PER_ROW",
            "ROWS_PER_BLOCK", "VECTOR_WIDTH", "KEPT_VECTORS", "PV_BLOCK_M", "PV_BLOCK_K", "PV_WARPS", "PV_STAGES",
        )  # fmt: skip
        return genes.named(*same) | {
            "PRODUCT": genes.PRODUCT,
            "WGMMA_FUNCTIONS": _wgmma_functions(problem, genes),
            "ELEMENT": problem.element.cuda,
            "SCORE": DTYPES[problem.dtype if has_tile_softmax(genes) else genes.S_TYPE].cuda,
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
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
        genes = self.genes(config)
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
        genes = self.genes(config)
        scores = query_rows(problem) * score_stride(problem)
        own = {"p": scores * ELEMENT_BYTES} if genes.P_PLACE == "own" else {}
        tiles = {"tiles": 8 * query_rows(problem) * _references(problem, genes)} if has_tile_softmax(genes) else {}
        rows = {} if merges_late(genes) else {"rows": 8 * query_rows(problem)}
        return {"s": scores * DTYPES[genes.S_TYPE].bytes, **own, **tiles, **rows}

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, self.genes(config), registers)
