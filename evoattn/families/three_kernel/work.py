"""What the kernels of three_kernel do: see `evoattn.families.work`."""

from __future__ import annotations

import math
from typing import Literal

from evoattn.families.residency import WARP, register_cap
from evoattn.families.three_kernel.genes import ThreeKernelGenes
from evoattn.families.three_kernel.resources import (
    has_tile_softmax,
    may_overlap,
    merges_late,
    registers_needed,
    scores_smem_bytes,
    threads_a_block,
    uses_wgmma,
    values_smem_bytes,
)
from evoattn.families.work import LaunchWork, Step, row_steps, tensor_bytes, up_to
from evoattn.model.dtype import DTYPES
from evoattn.model.problem import AttentionProblem

MMA_WAIT, LDMATRIX_WAIT, SHUFFLE_WAIT, BARRIER_WAIT, FIRST_WAIT = 18, 24, 24, 40, 1100


def launch_work(problem: AttentionProblem, genes: ThreeKernelGenes, registers: int) -> tuple[LaunchWork, ...]:
    """Q Kᵀ, softmax unless P V merges the maxima, P V. S and P go through memory."""
    heads, dim = problem.heads * problem.batch, up_to(problem.head_dim, 16)
    queries = heads * problem.seqlen_q
    seen = problem.visible_pairs / (queries * problem.seqlen_k)
    stride = up_to(problem.seqlen_k, 8)
    score_bytes = 2 if has_tile_softmax(genes) else DTYPES[genes.S_TYPE].bytes
    s_bytes, p_bytes = queries * stride * seen * score_bytes, queries * stride * seen * 2.0
    references = math.ceil(problem.seqlen_k / (genes.BLOCK_N // genes.WARPS_N))
    tile_sums = 8.0 * queries * references * seen if has_tile_softmax(genes) else 0.0
    needed = registers_needed(problem, genes)
    threads = threads_a_block(genes)
    fixed = [min(n, register_cap(t // WARP or 1, 1), registers or 255) for n, t in zip(needed, threads, strict=True)]
    tensor: Literal["mma", "wgmma"] = "wgmma" if uses_wgmma(genes) else "mma"
    named = {
        "products by wgmma": uses_wgmma(genes),
        "softmax": ("rewrite", "statistics", "tiles", "tiles_late").index(genes.SOFTMAX),
        "own p": genes.P_PLACE == "own",
        "score bytes": score_bytes,
        "zigzag": genes.HEAD_ORDER == "zigzag",
        "dependent": ("none", "early", "late").index(genes.DEPENDENT_LAUNCH),
        "stages": genes.PV_STAGES,
        "tiles per block": genes.TILES_A_BLOCK,
        "warps n": genes.WARPS_N,
        "rows per warp": genes.PV_BLOCK_M / genes.PV_WARPS,
        "dot lanes": genes.THREADS_PER_ROW,
        "vector bytes": genes.VECTOR_WIDTH * score_bytes,
        "kept": genes.KEPT_VECTORS * genes.VECTOR_WIDTH * genes.THREADS_PER_ROW / problem.seqlen_k,
        "dim chunk": genes.BLOCK_K,
        "key chunk": genes.PV_BLOCK_K,
    }
    overlaps = may_overlap(genes)
    launches = [_scores(problem, genes, seen, dim, score_bytes, fixed[0], s_bytes + tile_sums, tensor, named)]
    if not merges_late(genes):
        launches.append(_softmax(problem, genes, fixed[1], s_bytes, p_bytes, tile_sums, overlaps, named))
    read = (s_bytes if genes.SOFTMAX == "statistics" else p_bytes) + tile_sums
    launches.append(_values(problem, genes, dim, fixed[2], read, tensor, overlaps, named))
    return tuple(launches)


def _scores(
    problem: AttentionProblem,
    genes: ThreeKernelGenes,
    seen: float,
    dim: int,
    score_bytes: int,
    registers: int,
    written: float,
    tensor: Literal["mma", "wgmma"],
    named: dict[str, float],
) -> LaunchWork:
    rows, keys, threads = genes.BLOCK_M, genes.BLOCK_N, threads_a_block(genes)[0]
    scores, warps = rows * keys, threads // WARP
    tiles = math.ceil(problem.seqlen_k / keys)
    blocks = math.ceil(tiles / genes.TILES_A_BLOCK) * math.ceil(problem.seqlen_q / rows)
    flops = 2.0 * scores * dim
    lanes = scores * (5.0 if has_tile_softmax(genes) else 2.0)
    exponentials = scores if has_tile_softmax(genes) else 0
    loaded = keys * problem.head_dim * 2.0
    reads = genes.WARPS_M * keys * dim * 2.0 + genes.WARPS_N * rows * dim * 2.0
    if uses_wgmma(genes):
        reads = (rows // 64 + 1) * keys * dim * 2.0 + rows * dim * 2.0
    store = scores * score_bytes
    issued = flops / 4096 + (lanes + exponentials) / WARP + reads / 512 + loaded / 170 + scores / WARP
    waits = (dim / 16 * 0.5 + 1) * MMA_WAIT + LDMATRIX_WAIT + 2 * BARRIER_WAIT + 4 * SHUFFLE_WAIT + 60
    return LaunchWork(
        "three_kernel_scores",
        blocks * problem.heads * problem.batch,
        threads,
        warps,
        scores_smem_bytes(problem, genes),
        registers,
        Step(flops, lanes, exponentials, issued, reads + loaded + store, loaded + store, waits),
        min(tiles, genes.TILES_A_BLOCK) * min(1.0, seen + 0.5 * keys / problem.seqlen_k * problem.causal),
        min(tiles, genes.TILES_A_BLOCK),
        Step(
            instructions=80.0 * warps + 3 * rows * dim * 2 / 512, loaded_bytes=rows * problem.head_dim * 2.0,
            waits=FIRST_WAIT,
        ),
        tensor,
        in_flight_bytes=(rows + keys) * dim * 2.0,
        read_bytes=tensor_bytes(problem, "q", "k"),
        write_bytes=written,
        sweep_bytes=tensor_bytes(problem, "k"),
        sweepers=blocks / max(1, tiles // genes.TILES_A_BLOCK) * problem.group_size,
        genes=named,
    )  # fmt: skip


def _softmax(
    problem: AttentionProblem,
    genes: ThreeKernelGenes,
    registers: int,
    s_bytes: float,
    p_bytes: float,
    tile_sums: float,
    overlaps: bool,
    named: dict[str, float],
) -> LaunchWork:
    queries, threads = problem.heads * problem.batch * problem.seqlen_q, threads_a_block(genes)[1]
    blocks = math.ceil(queries / genes.ROWS_PER_BLOCK)
    if has_tile_softmax(genes):
        read, written, exponentials = tile_sums, 8.0 * queries, tile_sums / 8
        vectors = tile_sums / 8 / queries / genes.THREADS_PER_ROW
    else:
        again = named["kept"] < 1 and genes.SOFTMAX == "rewrite"
        read = s_bytes * (2 if again else 1)
        written = p_bytes if genes.SOFTMAX == "rewrite" else 8.0 * queries
        exponentials = s_bytes / named["score bytes"] * (2 if again else 1)
        vectors = exponentials / queries / genes.THREADS_PER_ROW / genes.VECTOR_WIDTH
    per_block = exponentials / blocks
    return LaunchWork(
        "three_kernel_softmax",
        blocks,
        threads,
        max(1, threads // WARP),
        0,
        registers,
        Step(),
        0.0,
        0.0,
        Step(
            fp32=per_block * 4,
            special=per_block,
            instructions=per_block * 6 / WARP + 60 * threads / WARP,
            loaded_bytes=(read + written) / blocks,
            waits=FIRST_WAIT + math.log2(genes.THREADS_PER_ROW) * 2 * SHUFFLE_WAIT + 120 * vectors,
        ),
        in_flight_bytes=min(genes.KEPT_VECTORS, max(1.0, vectors)) * named["vector bytes"] * threads,
        read_bytes=read,
        write_bytes=written,
        scratch_bytes=read,
        overlaps=overlaps,
        genes=named,
    )


def _values(
    problem: AttentionProblem,
    genes: ThreeKernelGenes,
    dim: int,
    registers: int,
    p_read: float,
    tensor: Literal["mma", "wgmma"],
    overlaps: bool,
    named: dict[str, float],
) -> LaunchWork:
    rows, keys, warps = genes.PV_BLOCK_M, genes.PV_BLOCK_K, genes.PV_WARPS
    flops = 2.0 * rows * keys * dim
    loaded = keys * problem.head_dim * 2.0 + rows * keys * 2.0
    reads = warps * keys * dim * 2.0 + rows * keys * 2.0 if tensor == "mma" else (keys * dim + rows * keys) * 2.0
    late = {"statistics": 4.0, "tiles": 0.5, "tiles_late": 0.6}.get(genes.SOFTMAX, 0.0)
    lanes = rows * keys * late + (rows * dim * 1.0 if has_tile_softmax(genes) else 0.0)
    exponentials = rows * keys if genes.SOFTMAX == "statistics" else 0
    issued = flops / 4096 + (lanes + exponentials) / WARP + reads / 512 + 3 * loaded / 512
    mean, most, count = row_steps(problem, rows, keys)
    return LaunchWork(
        "three_kernel_values",
        count * problem.heads * problem.batch,
        WARP * warps,
        warps,
        values_smem_bytes(problem, genes),
        registers,
        Step(
            flops, lanes, exponentials, issued, reads + loaded, loaded,
            (keys / 16 * 0.5 + 1) * MMA_WAIT + LDMATRIX_WAIT + BARRIER_WAIT + 40,
        ),
        mean,
        most,
        Step(
            instructions=rows * dim / WARP + 60 * warps, shared_bytes=rows * dim * 4.0,
            loaded_bytes=rows * problem.head_dim * 2.0, waits=FIRST_WAIT,
        ),
        tensor,
        in_flight_bytes=(genes.PV_STAGES - 1) * loaded,
        read_bytes=tensor_bytes(problem, "v") + p_read,
        write_bytes=tensor_bytes(problem, "o"),
        sweep_bytes=tensor_bytes(problem, "v"),
        sweepers=float(count * problem.group_size),
        scratch_bytes=p_read,
        overlaps=overlaps,
        genes=named,
    )  # fmt: skip
