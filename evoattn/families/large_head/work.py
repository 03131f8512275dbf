"""What the kernels of large_head do: see `evoattn.families.work`."""

from __future__ import annotations

import math
from typing import Literal

from evoattn.families.large_head.genes import LargeHeadGenes
from evoattn.families.large_head.resources import (
    is_fused,
    is_spread,
    on_tensor_cores,
    packed_rows,
    registers_needed,
    slice_elements,
    smem_bytes,
    vector_elements,
    workspace_bytes,
)
from evoattn.families.residency import WARP, register_cap
from evoattn.families.work import LaunchWork, Step, tensor_bytes, together
from evoattn.model.problem import AttentionProblem

SHUFFLE_WAIT, BARRIER_WAIT, LOAD_WAIT, FAR_WAIT, CLUSTER_WAIT, FIRST_WAIT = 24, 40, 30, 500, 900, 1100
TF32_FLOPS, TF32_PRODUCTS = 2048, 3
"""Of one mma.m16n8k8; products in place of one in fp32."""


def launch_work(problem: AttentionProblem, genes: LargeHeadGenes, registers: int) -> tuple[LaunchWork, ...]:
    """One launch, or with a workspace that of the partial scores and that of the rest."""
    blocks = math.ceil(packed_rows(problem) / genes.BLOCK_M) * genes.DIM_SPLIT
    heads = problem.kv_heads * problem.batch
    tiles = math.ceil(problem.seqlen_k / genes.BLOCK_N)
    pairs = problem.visible_pairs / (problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_k)
    visited = tiles * min(1.0, pairs + (0.5 * genes.BLOCK_M / packed_rows(problem) if problem.causal else 0.0))
    scores_smem, smem = smem_bytes(problem, genes)
    fixed = registers or min(registers_needed(problem, genes), register_cap(genes.WARPS, 1))
    qk, pv = _products(problem, genes)
    own, size = slice_elements(problem, genes), problem.element_bytes
    tile_bytes = float(genes.BLOCK_N * own * size)
    in_flight = tile_bytes * max(1, 2 * genes.STAGES - 1) if genes.STAGES else genes.WARPS * WARP * 16.0 * genes.UNROLL
    named = {
        "dim split": genes.DIM_SPLIT,
        "math": ("fma", "tf32x3", "tf32x3_spread").index(genes.MATH),
        "exchange": ("none", "cluster", "workspace").index(genes.EXCHANGE),
        "dot lanes": genes.LANES,
        "score rows": genes.SCORE_ROWS,
        "score keys": genes.SCORE_KEYS,
        "value threads": genes.VALUE_THREADS,
        "stages": genes.STAGES,
        "q registers": genes.Q_PLACE == "global",
        "unroll": genes.UNROLL,
        "dependent": genes.DEPENDENT_LAUNCH,
    }
    tensor: Literal["mma", "tf32"] = "tf32" if on_tensor_cores(genes) else "mma"
    threads = WARP * genes.WARPS
    q_bytes = genes.BLOCK_M * own * size * 1.0
    ends = Step(
        instructions=genes.BLOCK_M * own / WARP * 2 + 60 * genes.WARPS, loaded_bytes=2 * q_bytes, waits=FIRST_WAIT
    )
    softmax = _softmax(genes)
    if is_fused(genes):
        cluster = genes.DIM_SPLIT if genes.EXCHANGE == "cluster" else 1
        exchanged = 8.0 * genes.BLOCK_M * genes.BLOCK_N if cluster > 1 else 0.0
        step = together(qk, pv, softmax, Step(shared_bytes=exchanged * 2, waits=CLUSTER_WAIT if cluster > 1 else 0.0))
        return (
            LaunchWork(
                "large_head", blocks * heads, threads, genes.WARPS, smem, fixed, step, visited, tiles, ends, tensor,
                in_flight_bytes=in_flight, read_bytes=tensor_bytes(problem, "q", "k", "v"),
                write_bytes=tensor_bytes(problem, "o"), sweep_bytes=tensor_bytes(problem, "k", "v"),
                sweepers=blocks / genes.DIM_SPLIT, cluster=cluster, genes=named,
            ),
        )  # fmt: skip
    partials = float(workspace_bytes(problem, genes)["partials"])
    a_tile = 4.0 * genes.BLOCK_M * genes.BLOCK_N
    first = Step(loaded_bytes=q_bytes + a_tile, waits=FIRST_WAIT)
    sums = Step(
        fp32=genes.BLOCK_M * genes.BLOCK_N * genes.DIM_SPLIT * 1.0,
        instructions=genes.BLOCK_M * genes.BLOCK_N * genes.DIM_SPLIT / 4 / WARP * 3,
        loaded_bytes=a_tile * genes.DIM_SPLIT,
        waits=FAR_WAIT,
    )
    return (
        LaunchWork(
            "large_head_scores", int(blocks * visited * heads), threads, genes.WARPS, scores_smem, fixed, qk, 1.0, 1,
            first, tensor, in_flight_bytes=in_flight, read_bytes=tensor_bytes(problem, "q", "k"),
            write_bytes=partials, sweep_bytes=tensor_bytes(problem, "k"),
            sweepers=blocks / genes.DIM_SPLIT, genes=named,
        ),
        LaunchWork(
            "large_head", blocks * heads, threads, genes.WARPS, smem, fixed, together(pv, softmax, sums), visited,
            tiles, ends, tensor, in_flight_bytes=in_flight, read_bytes=tensor_bytes(problem, "v") + partials,
            write_bytes=tensor_bytes(problem, "o"), sweep_bytes=tensor_bytes(problem, "v"), scratch_bytes=partials,
            sweepers=blocks / genes.DIM_SPLIT, overlaps=genes.DEPENDENT_LAUNCH, genes=named,
        ),
    )  # fmt: skip


def _products(problem: AttentionProblem, genes: LargeHeadGenes) -> tuple[Step, Step]:
    """Q Kᵀ and P V of a tile, without the softmax between them."""
    rows, keys, own, size = genes.BLOCK_M, genes.BLOCK_N, slice_elements(problem, genes), problem.element_bytes
    scores, tile_bytes = rows * keys, float(keys * own * size)
    copies = 3 * tile_bytes / 512 if genes.STAGES else 0.0
    far = 0 if genes.STAGES else FAR_WAIT
    if on_tensor_cores(genes):
        flops = 2.0 * scores * own * TF32_PRODUCTS
        k_reads = tile_bytes * rows / genes.SCORE_ROWS
        q_reads = rows * own * size * 1.0 * keys / genes.SCORE_KEYS
        split = (k_reads + q_reads) / 4 * 4.0  # each float is made two
        steps = own / 8 / max(1, genes.UNROLL)
        qk = Step(
            flops, split, 0.0, flops / TF32_FLOPS + split / WARP + (k_reads + q_reads) / 512 + copies,
            (0.0 if is_spread(genes) else k_reads + q_reads) + tile_bytes, tile_bytes, steps * 20 + BARRIER_WAIT + far,
        )  # fmt: skip
        v_reads = tile_bytes * rows / max(1, rows * genes.VALUE_THREADS // (WARP * genes.WARPS))
        pv = Step(
            flops, v_reads, 0.0, flops / TF32_FLOPS + v_reads / WARP + v_reads / 128 + copies,
            v_reads + tile_bytes, tile_bytes, keys / 8 * 20 + BARRIER_WAIT + far,
        )  # fmt: skip
        return qk, pv
    widened = 0.0 if size == 4 else 1.0
    reads = scores * own * (1 / genes.SCORE_ROWS + 1 / genes.SCORE_KEYS)
    fma = scores * own + reads * widened
    reduced = scores * genes.LANES / WARP * math.log2(genes.LANES)
    vector = vector_elements(problem)
    k_waits = LOAD_WAIT * own / vector / genes.LANES / genes.UNROLL
    qk = Step(
        0.0, fma, 0.0, fma / WARP + reads / vector / WARP + 2 * reduced + copies, reads * size + tile_bytes, tile_bytes,
        math.log2(genes.LANES) * SHUFFLE_WAIT + k_waits + BARRIER_WAIT + far,
    )  # fmt: skip
    output_rows = max(1, rows * genes.VALUE_THREADS // (WARP * genes.WARPS))
    v_reads = keys * own * rows / output_rows
    pv_fma = scores * own + v_reads * widened
    p_reads = scores * genes.VALUE_THREADS
    pv = Step(
        0.0, pv_fma, 0.0, pv_fma / WARP + v_reads / vector / WARP + p_reads / 4 / WARP + copies,
        v_reads * size + p_reads / WARP * 16 + tile_bytes, tile_bytes,
        LOAD_WAIT * keys / genes.UNROLL / 4 + BARRIER_WAIT + far,
    )  # fmt: skip
    return qk, pv


def _softmax(genes: LargeHeadGenes) -> Step:
    scores = genes.BLOCK_M * genes.BLOCK_N
    per_warp = math.ceil(genes.BLOCK_M / genes.WARPS)
    keys = math.ceil(genes.BLOCK_N / WARP) * WARP
    return Step(
        fp32=5.0 * genes.BLOCK_M * keys, special=genes.BLOCK_M * (keys + WARP) * 1.0,
        instructions=genes.BLOCK_M * (keys / WARP * 10 + 20), shared_bytes=8.0 * scores,
        waits=2 * BARRIER_WAIT + 5 * SHUFFLE_WAIT * math.sqrt(per_warp) + 80,
    )  # fmt: skip
