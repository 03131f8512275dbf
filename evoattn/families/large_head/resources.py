"""The genes of large_head, and what they take: threads, shared memory, registers, work."""

import math
from typing import Literal

from evoattn.families.genes import Genes, gene
from evoattn.families.residency import WARP, register_cap
from evoattn.families.work import LaunchWork, Step, tensor_bytes, together
from evoattn.model.problem import AttentionProblem


class LargeHeadGenes(Genes):
    """The parameters of large_head."""

    BLOCK_M: int = gene("query rows per block; the query heads of one K/V head are stacked", (1, 2, 4, 8, 16, 32, 64))
    BLOCK_N: int = gene("keys per tile", (4, 8, 16, 32, 64, 128))
    DIM_SPLIT: int = gene("blocks that share head_dim, of Q and K and then of V and O", (1, 2, 4, 5, 8, 16, 32, 64))
    EXCHANGE: Literal["none", "cluster", "workspace"] = gene(
        "how these blocks add up their partial scores: there is only one (none); through each other's shared "
        "memory in a cluster (cluster); through global memory between two launches (workspace)"
    )
    DEPENDENT_LAUNCH: bool = gene(
        "with EXCHANGE=workspace: the second launch begins while the first runs, and loads its first tiles of V "
        "before it waits for it"
    )
    MATH: Literal["fma", "tf32x3", "tf32x3_spread"] = gene(
        "both products on CUDA cores (fma); on tensor cores, by three tf32 products in place of one in fp32, "
        "which keep its precision (tf32x3); the same, where each warp has all scores of the block over its own "
        "part of head_dim and reads Q and K from global memory (tf32x3_spread)"
    )
    WARPS: int = gene("warps per block", (2, 4, 8, 16, 32))
    LANES: int = gene(
        "neighbouring lanes that share a tile of scores; with fma each has 16 bytes of head_dim", (8, 16, 32)
    )
    SCORE_ROWS: int = gene(
        "query rows in a tile of scores, which share each read of K; 16 and 32 need tf32x3", (1, 2, 4, 8, 16, 32)
    )
    SCORE_KEYS: int = gene(
        "keys in a tile of scores, which share each read of Q; 16 and more need tf32x3", (1, 2, 4, 8, 16, 32, 64)
    )
    VALUE_THREADS: int = gene("neighbouring threads that share an output row", (8, 16, 32, 64, 128, 256, 512, 1024))
    Q_PLACE: Literal["shared", "global"] = gene(
        "Q is copied to shared memory, or read from global memory for each tile of scores"
    )
    STAGES: int = gene(
        "tiles of K and of V in shared memory; with 0 both are read from global memory, with 2 the next tile is "
        "copied while this one is in use",
        (0, 1, 2),
    )
    UNROLL: int = gene(
        "unrolling of the inner loops over head_dim and keys; with tf32x3_spread, steps of head_dim in flight",
        (1, 2, 4, 8),
    )


VECTOR_BYTES = 16
SEGMENTED = 64
"""Products that a lane adds up before `ScoreProduct` takes them in segments, with a second set of sums."""
QK_PAD, V_PAD, SCORE_PAD = 16, 4, 8
"""Floats between rows in shared memory that the loads of tensor-core fragments want (`large_head.cu.j2`, PADDED)."""
FIXED_REGISTERS, FIXED_TENSOR_REGISTERS = 48, 36
"""Addresses, counters, bounds and vectors under way; fitted to NVRTC 13.0 on sm_89 and sm_90a."""
POINTER_REGISTERS = 16
"""Further addresses of the rows of K and V where these are read from global memory."""


def vector_elements(problem: AttentionProblem) -> int:
    """Elements of a 16-byte load."""
    return VECTOR_BYTES // problem.element_bytes


def slice_elements(problem: AttentionProblem, genes: LargeHeadGenes) -> int:
    """Elements of a row that one block has."""
    return problem.head_dim // genes.DIM_SPLIT


def packed_rows(problem: AttentionProblem) -> int:
    """Query rows that share a K/V head: its group's query heads, one below the other."""
    return problem.group_size * problem.seqlen_q


def is_fused(genes: LargeHeadGenes) -> bool:
    return genes.EXCHANGE != "workspace"


def on_tensor_cores(genes: LargeHeadGenes) -> bool:
    return genes.MATH != "fma"


def is_spread(genes: LargeHeadGenes) -> bool:
    """Whether warps that share a tile of scores have parts of the slice, right from global memory, and their sums are
    added up."""
    return genes.MATH == "tf32x3_spread"


def padded_row(elements: int, pad: int, genes: LargeHeadGenes) -> int:
    """Elements from one row to the next in shared memory."""
    return elements + (pad if on_tensor_cores(genes) else 0)


def k_bytes(problem: AttentionProblem, genes: LargeHeadGenes) -> int:
    """One tile of K in shared memory."""
    return genes.BLOCK_N * padded_row(slice_elements(problem, genes), QK_PAD, genes) * problem.element_bytes


def _v_bytes(problem: AttentionProblem, genes: LargeHeadGenes) -> int:
    """One tile of V in shared memory."""
    return genes.BLOCK_N * padded_row(slice_elements(problem, genes), V_PAD, genes) * problem.element_bytes


def q_bytes(problem: AttentionProblem, genes: LargeHeadGenes) -> int:
    row = padded_row(slice_elements(problem, genes), QK_PAD, genes) * problem.element_bytes
    return genes.BLOCK_M * row if genes.Q_PLACE == "shared" else 0


def smem_bytes(problem: AttentionProblem, genes: LargeHeadGenes) -> tuple[int, int]:
    """Dynamic shared memory of `large_head_scores` and of `large_head`.

    Q and a tile of K, or a tile of sums per warp; Q, the stages of K and V, those sums, in a cluster a tile of partial
    scores and what `cluster_sum.cuh` receives, a tile of scores for each group that adds up partial ones, two factors a
    row. Without a first launch the second has Q and K, with one it has V alone."""
    stages, rows, keys = genes.STAGES, genes.BLOCK_M, genes.BLOCK_N
    q, v, k = q_bytes(problem, genes), _v_bytes(problem, genes), 0 if is_spread(genes) else k_bytes(problem, genes)
    sums = 4 * genes.WARPS * genes.SCORE_ROWS * genes.SCORE_KEYS if is_spread(genes) else 0
    inputs = q + stages * (k + v) + sums if is_fused(genes) else stages * v
    tile, partials = 4 * rows * padded_row(keys, SCORE_PAD, genes), 0
    if genes.EXCHANGE == "cluster":
        split, vectors = genes.DIM_SPLIT, rows * keys // 4
        partials = tile + 16 * split * math.ceil(vectors / split) + 16
    scores = _sum_groups(genes) * tile
    return q + min(stages, 1) * k + sums, inputs + partials + scores + 8 * rows


def _sum_groups(genes: LargeHeadGenes) -> int:
    """Tiles in which the second launch adds up partial scores, so that all its threads have some."""
    if is_fused(genes):
        return 1
    return max(1, min(genes.DIM_SPLIT, 4 * WARP * genes.WARPS // (genes.BLOCK_M * genes.BLOCK_N)))


def registers_needed(problem: AttentionProblem, genes: LargeHeadGenes) -> int:
    """Estimate of the registers per thread below which ptxas spills: the output tile beside the larger of the two
    products' operands."""
    if on_tensor_cores(genes):
        return _tensor_registers(problem, genes)
    vector, unroll = vector_elements(problem), genes.UNROLL
    rows, keys = genes.SCORE_ROWS, genes.SCORE_KEYS
    chunks = slice_elements(problem, genes) // vector
    output_rows = warp_output_rows(genes)
    vectors = math.ceil(chunks / genes.VALUE_THREADS)
    output = output_rows * vectors * vector
    sums = rows * keys * (2 if math.ceil(chunks / genes.LANES) * vector > SEGMENTED else 1)
    score = sums + rows * vector + vector + 2 * (rows + keys) + (unroll - 1) * vector
    value = 4 * output_rows + vector * min(vectors, 2) + (unroll - 1) * vector
    return output + max(score, value) + FIXED_REGISTERS + _softmax_registers(genes)


def warp_output_rows(genes: LargeHeadGenes) -> int:
    """Output rows of a thread, or of a warp of tensor-core products."""
    return genes.BLOCK_M * genes.VALUE_THREADS // (WARP * genes.WARPS)


def _softmax_registers(genes: LargeHeadGenes) -> int:
    """A maximum and a sum for each row of a warp."""
    return 2 * math.ceil(genes.BLOCK_M / genes.WARPS)


def _tensor_registers(problem: AttentionProblem, genes: LargeHeadGenes) -> int:
    """`registers_needed` where the products are fragments: fp32 sums, and operands of which each float is two."""
    rows, keys, unroll = genes.SCORE_ROWS, genes.SCORE_KEYS, min(genes.UNROLL, 2)
    output_rows, runs = warp_output_rows(genes), slice_elements(problem, genes) // genes.VALUE_THREADS
    output = output_rows * runs + 2 * runs
    score = rows * keys // WARP + unroll * (rows + 12) + 2 * (rows // 8 + keys // 8)
    if is_spread(genes):  # but where copies of V follow them, ptxas puts off loads that would spill
        ahead = min(unroll, slice_elements(problem, genes) // (16 * spread_parts(genes))) if is_fused(genes) else 1
        score = rows * keys // WARP + ahead * (rows + keys) // 2 + rows
    value = output_rows + unroll * (output_rows // 2 + 16)
    larger = output + max(score, value) if is_fused(genes) else max(score, output + value)
    pointers = POINTER_REGISTERS if genes.STAGES == 0 else 0
    return larger + pointers + FIXED_TENSOR_REGISTERS + _softmax_registers(genes)


def spread_parts(genes: LargeHeadGenes) -> int:
    """Warps that share a tile of scores with MATH=tf32x3_spread; 0 or 1 if none do."""
    tiles = genes.BLOCK_M // genes.SCORE_ROWS * (genes.BLOCK_N // genes.SCORE_KEYS)
    return genes.WARPS // tiles if tiles else 0


def workspace_bytes(problem: AttentionProblem, genes: LargeHeadGenes) -> dict[str, int]:
    if is_fused(genes):
        return {}
    tiles = math.ceil(packed_rows(problem) / genes.BLOCK_M) * math.ceil(problem.seqlen_k / genes.BLOCK_N)
    return {"partials": 4 * problem.batch * problem.kv_heads * tiles * genes.DIM_SPLIT * genes.BLOCK_M * genes.BLOCK_N}


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
