"""Attention for a head_dim of hundreds to thousands and few queries: head_dim split over blocks, any GPU of the table."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import attention_args, why_no_lse
from evoattn.families.residency import WARP, why_too_few_registers
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import Buffer, KernelLaunch, Scalar
from evoattn.model.problem import DTYPES, AttentionProblem
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 256, 8192
ELEMENT_TYPES = {"fp16": "Fp16", "bf16": "Bf16", "fp32": "Fp32"}
VECTOR_BYTES = 16
MAX_CLUSTER = 8
"""Blocks in a cluster that every device of sm_90 takes (CUDA C++ Programming Guide, thread block clusters)."""
MAX_GRID_YZ = 65535
MAX_WORKSPACE_BYTES = 1 << 30
"""Partial scores in global memory: beyond it another family is the right one."""
SEGMENTED = 64
"""Products a lane adds up before `ScoreProduct` takes them in segments, with a second set of sums."""
QK_PAD, V_PAD, SCORE_PAD = 16, 4, 8
"""Floats between rows in shared memory that the loads of tensor-core fragments want (`large_head.cu.j2`, PADDED)."""
FIXED_REGISTERS, FIXED_TENSOR_REGISTERS = 48, 36
"""Addresses, counters, bounds and vectors under way; fitted to NVRTC 13.0 on sm_89 and sm_90a."""
POINTER_REGISTERS = 16
"""Further addresses of the rows of K and V where these are read from global memory."""


def _vector(problem: AttentionProblem) -> int:
    """Elements of a 16-byte load."""
    return VECTOR_BYTES // problem.element_bytes


def _slice(problem: AttentionProblem, config: KernelConfig) -> int:
    """Elements of a row that one block has."""
    return problem.head_dim // config["DIM_SPLIT"]


def _rows(problem: AttentionProblem) -> int:
    """Query rows that share a K/V head: its group's query heads, one below the other."""
    return problem.group_size * problem.seqlen_q


def _fused(config: KernelConfig) -> bool:
    return config["EXCHANGE"] != "workspace"


def _on_tensor_cores(config: KernelConfig) -> bool:
    return config["MATH"] != "fma"


def _spread(config: KernelConfig) -> bool:
    """Whether warps that share a tile of scores have parts of the slice, right from global memory, and their sums are added up."""
    return config["MATH"] == "tf32x3_spread"


def _padded(elements: int, pad: int, config: KernelConfig) -> int:
    """Elements from one row to the next in shared memory."""
    return elements + (pad if _on_tensor_cores(config) else 0)


def _k_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """One tile of K in shared memory."""
    return config["BLOCK_N"] * _padded(_slice(problem, config), QK_PAD, config) * problem.element_bytes


def _v_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """One tile of V in shared memory."""
    return config["BLOCK_N"] * _padded(_slice(problem, config), V_PAD, config) * problem.element_bytes


def _q_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    row = _padded(_slice(problem, config), QK_PAD, config) * problem.element_bytes
    return config["BLOCK_M"] * row if config["Q_PLACE"] == "shared" else 0


def smem_bytes(problem: AttentionProblem, config: KernelConfig) -> tuple[int, int]:
    """Dynamic shared memory of `large_head_scores` and of `large_head`.

    Q and a tile of K, or a tile of sums a warp; Q, the stages of K and V, those sums, in a cluster a tile of partial scores and what
    `cluster_sum.cuh` receives, a tile of scores for each group that adds up partial ones, two factors a row. Without a first launch the
    second has Q and K, with one it has V alone.
    """
    stages, rows, keys = config["STAGES"], config["BLOCK_M"], config["BLOCK_N"]
    q, v, k = _q_bytes(problem, config), _v_bytes(problem, config), 0 if _spread(config) else _k_bytes(problem, config)
    sums = 4 * config["WARPS"] * config["SCORE_ROWS"] * config["SCORE_KEYS"] if _spread(config) else 0
    inputs = q + stages * (k + v) + sums if _fused(config) else stages * v
    tile, partials = 4 * rows * _padded(keys, SCORE_PAD, config), 0
    if config["EXCHANGE"] == "cluster":
        split, vectors = config["DIM_SPLIT"], rows * keys // 4
        partials = tile + 16 * split * math.ceil(vectors / split) + 16
    scores = _sum_groups(config) * tile
    return q + min(stages, 1) * k + sums, inputs + partials + scores + 8 * rows


def _sum_groups(config: KernelConfig) -> int:
    """Tiles in which the second launch adds up partial scores, so that all its threads have some."""
    if _fused(config):
        return 1
    return max(1, min(config["DIM_SPLIT"], 4 * WARP * config["WARPS"] // (config["BLOCK_M"] * config["BLOCK_N"])))


def registers_needed(problem: AttentionProblem, config: KernelConfig) -> int:
    """Estimate of the registers a thread below which ptxas spills: the output tile beside the larger of the two products' operands."""
    if _on_tensor_cores(config):
        return _tensor_registers(problem, config)
    vector, unroll = _vector(problem), config["UNROLL"]
    rows, keys = config["SCORE_ROWS"], config["SCORE_KEYS"]
    chunks = _slice(problem, config) // vector
    output_rows = _output_rows(config)
    vectors = math.ceil(chunks / config["VALUE_THREADS"])
    output = output_rows * vectors * vector
    sums = rows * keys * (2 if math.ceil(chunks / config["LANES"]) * vector > SEGMENTED else 1)
    score = sums + rows * vector + vector + 2 * (rows + keys) + (unroll - 1) * vector
    value = 4 * output_rows + vector * min(vectors, 2) + (unroll - 1) * vector
    return output + max(score, value) + FIXED_REGISTERS + _softmax_registers(config)


def _output_rows(config: KernelConfig) -> int:
    """Output rows of a thread, or of a warp of tensor-core products."""
    return config["BLOCK_M"] * config["VALUE_THREADS"] // (WARP * config["WARPS"])


def _softmax_registers(config: KernelConfig) -> int:
    """A maximum and a sum for each row of a warp."""
    return 2 * math.ceil(config["BLOCK_M"] / config["WARPS"])


def _tensor_registers(problem: AttentionProblem, config: KernelConfig) -> int:
    """`registers_needed` where the products are fragments: fp32 sums, and operands of which each float is two."""
    rows, keys, unroll = config["SCORE_ROWS"], config["SCORE_KEYS"], min(config["UNROLL"], 2)
    output_rows, runs = _output_rows(config), _slice(problem, config) // config["VALUE_THREADS"]
    output = output_rows * runs + 2 * runs
    score = rows * keys // WARP + unroll * (rows + 12) + 2 * (rows // 8 + keys // 8)
    if _spread(config):  # but where copies of V follow them, ptxas puts off loads that would spill
        ahead = min(unroll, _slice(problem, config) // (16 * _spread_parts(config))) if _fused(config) else 1
        score = rows * keys // WARP + ahead * (rows + keys) // 2 + rows
    value = output_rows + unroll * (output_rows // 2 + 16)
    larger = output + max(score, value) if _fused(config) else max(score, output + value)
    pointers = POINTER_REGISTERS if config["STAGES"] == 0 else 0
    return larger + pointers + FIXED_TENSOR_REGISTERS + _softmax_registers(config)


def _why_wrong_products(problem: AttentionProblem, config: KernelConfig) -> str | None:
    """Tiles that the chosen arithmetic does not have."""
    rows, keys, value_threads, piece = (
        config["SCORE_ROWS"],
        config["SCORE_KEYS"],
        config["VALUE_THREADS"],
        _slice(problem, config),
    )
    if not _on_tensor_cores(config):
        fits = max(rows, keys) <= 8
        return (
            None
            if fits
            else f"Score tiles of SCORE_ROWS={rows} by SCORE_KEYS={keys} are for MATH=tf32x3; those of fma end at 8 by 8."
        )
    if problem.dtype != "fp32":
        return f"MATH={config['MATH']} makes fp32 of three tf32 products, and {problem.dtype} needs but one of its own."
    if rows % 16 or keys % 8 or config["LANES"] != WARP:
        return f"MATH=tf32x3 takes score tiles of 16 rows by 8 keys or more and LANES=32, not {rows} by {keys} and LANES={config['LANES']}."
    output_rows = _output_rows(config)
    if output_rows % 16 or output_rows == 0:
        return f"MATH=tf32x3 gives a warp 16 output rows or more, and VALUE_THREADS={value_threads} leave it {output_rows}."
    if piece % max(value_threads, WARP) or value_threads < WARP:
        return f"MATH=tf32x3 gives a warp runs of 32 columns, and VALUE_THREADS={value_threads} do not share a slice of {piece} so."
    return None


def _spread_parts(config: KernelConfig) -> int:
    """Warps that share a tile of scores with MATH=tf32x3_spread; 0 or 1 if none do."""
    tiles = config["BLOCK_M"] // config["SCORE_ROWS"] * (config["BLOCK_N"] // config["SCORE_KEYS"])
    return config["WARPS"] // tiles if tiles else 0


def _why_not_spread(problem: AttentionProblem, config: KernelConfig) -> str | None:
    """Tiles and slices whose warps cannot share head_dim."""
    rows, keys, piece, parts = (
        config["SCORE_ROWS"],
        config["SCORE_KEYS"],
        _slice(problem, config),
        _spread_parts(config),
    )
    if parts < 2:
        return f"MATH=tf32x3_spread shares score tiles between warps; WARPS={config['WARPS']} are too few for tiles of {rows} by {keys}."
    if config["Q_PLACE"] == "shared":
        return "MATH=tf32x3_spread reads Q right into the registers of the warps that want it: Q_PLACE=shared would be a detour."
    if piece % (16 * parts):
        return f"MATH=tf32x3_spread gives a warp steps of 16 dimensions, and {parts} warps do not share a slice of {piece} so."
    return None


def _why_wrong_shape(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
    """Slices, score tiles and output tiles that are not whole, and exchanges that are not there."""
    block_m, block_n, split, exchange = (config[name] for name in ("BLOCK_M", "BLOCK_N", "DIM_SPLIT", "EXCHANGE"))
    rows, keys, lanes, threads = config["SCORE_ROWS"], config["SCORE_KEYS"], config["LANES"], WARP * config["WARPS"]
    if problem.head_dim % (split * _vector(problem)):
        return f"DIM_SPLIT={split} does not divide head_dim {problem.head_dim} into whole vectors of {_vector(problem)} elements."
    if (split == 1) != (exchange == "none") and exchange != "workspace":
        return (
            f"EXCHANGE={exchange} does not go with DIM_SPLIT={split}: one block has nothing to exchange, several must."
        )
    if config["DEPENDENT_LAUNCH"] and exchange != "workspace":
        return f"DEPENDENT_LAUNCH lets a second launch begin early, and EXCHANGE={exchange} has one."
    if config["DEPENDENT_LAUNCH"] and gpu.capability < (9, 0):
        return f"DEPENDENT_LAUNCH needs the dependent launches of sm_90, and {gpu.name} is {gpu.arch}."
    if exchange == "cluster" and gpu.capability < (9, 0):
        return f"EXCHANGE=cluster needs the clusters of sm_90, and {gpu.name} is {gpu.arch}."
    if exchange == "cluster" and split > MAX_CLUSTER:
        return f"DIM_SPLIT={split} is more than the {MAX_CLUSTER} blocks that a cluster may have on every device."
    if reason := _why_wrong_products(problem, config):
        return reason
    if block_m % rows or block_n % keys:
        return (
            f"Score tiles of SCORE_ROWS={rows} by SCORE_KEYS={keys} do not tile BLOCK_M={block_m} by BLOCK_N={block_n}."
        )
    if _spread(config) and (reason := _why_not_spread(problem, config)):
        return reason
    tiles = block_m // rows * (block_n // keys)
    if tiles % (WARP // lanes):
        return f"{tiles} score tiles of {rows} by {keys} do not fill whole warps of {WARP // lanes} groups of LANES={lanes}."
    if not _on_tensor_cores(config) and _slice(problem, config) // _vector(problem) < lanes:
        return f"LANES={lanes} lanes share the {_slice(problem, config) // _vector(problem)} vectors of a slice: some never have one."
    if threads % config["VALUE_THREADS"] or block_m % (threads // config["VALUE_THREADS"]):
        return f"BLOCK_M={block_m} rows do not divide over {threads} threads, VALUE_THREADS={config['VALUE_THREADS']} a row."
    if not _on_tensor_cores(config) and config["VALUE_THREADS"] >= 2 * (_slice(problem, config) // _vector(problem)):
        return f"VALUE_THREADS={config['VALUE_THREADS']} for a slice of {_slice(problem, config)} elements leave half of them or more idle."
    return None


def _why_too_big(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
    """Shared memory, workspace, grid and registers, with what they would take."""
    smem = max(smem_bytes(problem, config))
    if smem > gpu.smem_per_block:
        return (
            f"Shared memory would take {smem} bytes, {_q_bytes(problem, config)} of them for BLOCK_M={config['BLOCK_M']} rows of Q and "
            f"{_k_bytes(problem, config)} for each tile of K and V, STAGES={config['STAGES']}; {gpu.name} gives a block "
            f"{gpu.smem_per_block}."
        )
    scratch = sum(_workspace(problem, config).values())
    if scratch > MAX_WORKSPACE_BYTES:
        return f"The partial scores of DIM_SPLIT={config['DIM_SPLIT']} slices would take {scratch} bytes, over {MAX_WORKSPACE_BYTES}."
    if not _fused(config) and math.ceil(problem.seqlen_k / config["BLOCK_N"]) > MAX_GRID_YZ:
        return f"EXCHANGE=workspace puts the tiles of {problem.seqlen_k} keys in grid y, which ends at {MAX_GRID_YZ}."
    return why_too_few_registers(1, config["WARPS"], registers_needed(problem, config))


def _why_redundant(problem: AttentionProblem, config: KernelConfig) -> str | None:
    """Configs that do what a smaller one does."""
    block_m, block_n, stages = config["BLOCK_M"], config["BLOCK_N"], config["STAGES"]
    if block_m >= 2 * _rows(problem):
        return f"BLOCK_M={block_m} for {_rows(problem)} rows leaves half of the block or more without work."
    if block_n > 4 and block_n >= 2 * problem.seqlen_k:
        return f"BLOCK_N={block_n} for {problem.seqlen_k} keys leaves half of the tile or more without work."
    if stages > math.ceil(problem.seqlen_k / block_n):
        return f"STAGES={stages} is more than the tiles of {block_n} that {problem.seqlen_k} keys make."
    tensor = _on_tensor_cores(config)
    steps = (
        _slice(problem, config) // 16
        if tensor
        else math.ceil(_slice(problem, config) // _vector(problem) / config["LANES"])
    )
    trips = max(steps, block_n // (8 if tensor else 4))
    if config["UNROLL"] >= 2 * trips:
        return f"UNROLL={config['UNROLL']} changes nothing: the loops make at most {trips} trips."
    return None


def _workspace(problem: AttentionProblem, config: KernelConfig) -> dict[str, int]:
    if _fused(config):
        return {}
    tiles = math.ceil(_rows(problem) / config["BLOCK_M"]) * math.ceil(problem.seqlen_k / config["BLOCK_N"])
    return {
        "partials": 4
        * problem.batch
        * problem.kv_heads
        * tiles
        * config["DIM_SPLIT"]
        * config["BLOCK_M"]
        * config["BLOCK_N"]
    }


class LargeHead:
    """The `Family` of `templates/large_head.cu.j2`: any lengths, grouped heads, three masks, fp16, bf16 and fp32."""

    name: ClassVar[str] = "large_head"
    summary: ClassVar[str] = (
        "a large head_dim and few queries: head_dim split over blocks; CUDA cores, or three tf32 products for fp32"
    )
    devices: ClassVar[str] = "any GPU, sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = DTYPES

    def why_unsupported(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
            return f"large_head serves head_dim {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {problem.head_dim}."
        if problem.batch * problem.kv_heads > MAX_GRID_YZ:
            return f"large_head puts {problem.batch} times {problem.kv_heads} K/V heads in grid z, which ends at {MAX_GRID_YZ}."
        return why_no_lse(self.name, problem)

    def why_invalid(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_wrong_shape(problem, config, gpu)
            or _why_too_big(problem, config, gpu)
            or _why_redundant(problem, config)
        )

    def why_impossible(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_wrong_shape(problem, config, gpu)
            or _why_too_big(problem, config, gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        same = (
            "BLOCK_M",
            "BLOCK_N",
            "DIM_SPLIT",
            "WARPS",
            "LANES",
            "SCORE_ROWS",
            "SCORE_KEYS",
            "VALUE_THREADS",
            "STAGES",
            "UNROLL",
            "DEPENDENT_LAUNCH",
        )
        scores_smem, smem = smem_bytes(problem, config)
        return {name: config[name] for name in same} | {
            "ELEMENT": ELEMENT_TYPES[problem.dtype],
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
            "EXCHANGE": config["EXCHANGE"].upper(),
            "MATH": config["MATH"].upper(),
            "Q_IN_SHARED": config["Q_PLACE"] == "shared",
            "SCORES_SMEM_BYTES": scores_smem,
            "SMEM_BYTES": smem,
            "CLUSTER_DIMS": f"__cluster_dims__({config['DIM_SPLIT']}, 1, 1)" if config["EXCHANGE"] == "cluster" else "",
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        """A block for each slice of head_dim of each tile of rows; with a workspace, before that one for each tile of keys of each too."""
        split, block = config["DIM_SPLIT"], (WARP * config["WARPS"], 1, 1)
        x, z = math.ceil(_rows(problem) / config["BLOCK_M"]) * split, problem.kv_heads * problem.batch
        scores_smem, smem = smem_bytes(problem, config)
        cluster = (split if config["EXCHANGE"] == "cluster" else 1, 1, 1)
        if _fused(config):
            no_workspace = Scalar("int64", 0)  # a null pointer
            return (
                KernelLaunch("large_head", (x, 1, z), block, smem, (*attention_args(problem), no_workspace), cluster),
            )
        args, key_tiles = (
            (*attention_args(problem), Buffer("partials")),
            math.ceil(problem.seqlen_k / config["BLOCK_N"]),
        )
        return (
            KernelLaunch("large_head_scores", (x, key_tiles, z), block, scores_smem, args),
            KernelLaunch("large_head", (x, 1, z), block, smem, args, overlaps=config["DEPENDENT_LAUNCH"]),
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        return _workspace(problem, config)
