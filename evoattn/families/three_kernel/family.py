"""Attention in three launches: Q Kᵀ into a scratch buffer, softmax over its rows, P V; tensor cores, sm_80 and newer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import softmax_scale_log2, why_no_lse
from evoattn.families.flash_wgmma.family import tile_map
from evoattn.families.flash_wgmma.text import wgmma_function
from evoattn.families.three_kernel.resources import (
    CHUNK_COLUMNS,
    ELEMENT_BYTES,
    WARP,
    has_tile_softmax,
    scores_smem_bytes,
    threads_a_block,
    uses_wgmma,
    values_smem_bytes,
    why_too_big,
)
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar, TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
ELEMENT_TYPES = {"fp16": "Fp16", "bf16": "Bf16", "fp32": "Fp32"}
SCORE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
MAX_THREADS = 1024
WGMMA_ARCH = "sm_90a"
DEPENDENT_CAPABILITY = (9, 0)
"""From which on a launch may begin before the one before it has ended (CUDA C++ Programming Guide, programmatic dependent launch)."""
KEY_GROUP = 32
"""Keys of a warp are stored in groups of four n8 tiles, eight neighbours a lane."""
MAX_GRID_YZ = 65535
"""Largest y and z of a grid (CUDA C++ Programming Guide, technical specifications)."""
MAX_ROWS = 2**31 - 1
"""Rows of S count in an int."""


def score_stride(problem: AttentionProblem) -> int:
    """Elements from one row of S or P to the next: whole 16-byte chunks of 16-bit elements."""
    return math.ceil(problem.seqlen_k / 8) * 8


def _rows(problem: AttentionProblem) -> int:
    return problem.batch * problem.heads * problem.seqlen_q


def _late(config: KernelConfig) -> bool:
    return config["SOFTMAX"] == "statistics"


def _merges_late(config: KernelConfig) -> bool:
    """Whether P V merges the maxima of tiles, in two launches."""
    return config["SOFTMAX"] == "tiles_late"


def _overlaps(config: KernelConfig) -> bool:
    return config["DEPENDENT_LAUNCH"] != "none"


def _references(problem: AttentionProblem, config: KernelConfig) -> int:
    """Row maxima a row: each warp of Q Kᵀ takes its own keys' ones."""
    return math.ceil(problem.seqlen_k / (config["BLOCK_N"] // config["WARPS_N"]))


def _why_wrong_shape(config: KernelConfig) -> str | None:
    """Tiles that are not whole mma tiles of each warp."""
    for rows, warps in (("BLOCK_M", "WARPS_M"), ("PV_BLOCK_M", "PV_WARPS")):
        if config[rows] % (16 * config[warps]):
            return f"{rows}={config[rows]} queries do not divide into tiles of 16 for {warps}={config[warps]}."
    if config["BLOCK_N"] % (KEY_GROUP * config["WARPS_N"]):
        return f"BLOCK_N={config['BLOCK_N']} keys do not divide into groups of {KEY_GROUP} for WARPS_N={config['WARPS_N']}."
    scores, softmax, _ = threads_a_block(config)
    if scores > MAX_THREADS:
        return f"WARPS_M={config['WARPS_M']} times WARPS_N={config['WARPS_N']} are over the {MAX_THREADS} threads of a block."
    if softmax % WARP or softmax > MAX_THREADS:
        return (
            f"THREADS_PER_ROW={config['THREADS_PER_ROW']} times ROWS_PER_BLOCK={config['ROWS_PER_BLOCK']} are {softmax} threads: "
            f"a block has whole warps, at most {MAX_THREADS} threads."
        )
    return None


def _why_not_wgmma(config: KernelConfig, gpu: GpuSpec) -> str | None:
    """What PRODUCT=wgmma cannot do, and genes that it leaves nothing to do."""
    if not uses_wgmma(config):
        return (
            None if config["TILES_A_BLOCK"] == 1 else "PRODUCT=mma makes a tile of S a block: TILES_A_BLOCK must be 1."
        )
    if gpu.arch != WGMMA_ARCH:
        return f"PRODUCT=wgmma needs {WGMMA_ARCH}, and {gpu.name} is {gpu.arch}."
    for gene in ("BLOCK_M", "BLOCK_N", "PV_BLOCK_M", "PV_BLOCK_K"):
        if config[gene] % CHUNK_COLUMNS:
            return f"{gene}={config[gene]} is no multiple of {CHUNK_COLUMNS}, the rows of a wgmma and the columns of a tensor copy."
    for rows, warps in (("BLOCK_M", "WARPS_M"), ("PV_BLOCK_M", "PV_WARPS")):
        if config[warps] != config[rows] // 16:
            return f"A warp has 16 rows of a wgmma: {rows}={config[rows]} needs {warps}={config[rows] // 16}, not {config[warps]}."
    if config["WARPS_N"] > 1 or config["BLOCK_K"] > 32:
        return "PRODUCT=wgmma takes a tile of S at once: WARPS_N and BLOCK_K must be 1 and 32, to do nothing."
    if _late(config) or config["S_TYPE"] == "fp32":
        return (
            "PRODUCT=wgmma moves S and P by tensor copies in 16 bits: SOFTMAX must not be statistics, nor S_TYPE fp32."
        )
    return None


def _why_no_overlap(config: KernelConfig, gpu: GpuSpec) -> str | None:
    if _overlaps(config) and gpu.capability < DEPENDENT_CAPABILITY:
        return f"DEPENDENT_LAUNCH={config['DEPENDENT_LAUNCH']} needs griddepcontrol of sm_90 and newer, and {gpu.name} is {gpu.arch}."
    return None


def _why_wrong_scores(problem: AttentionProblem, config: KernelConfig) -> str | None:
    """Types and places of S and P that lose too much, overlap or do nothing."""
    s_type = config["S_TYPE"]
    if has_tile_softmax(config):
        return _why_wrong_tiles(config)
    if config["THREADS_PER_ROW"] == 1:
        return f"SOFTMAX={config['SOFTMAX']} reads whole rows: THREADS_PER_ROW must be over 1."
    if s_type == "bf16" and problem.dtype == "fp16":
        return "S_TYPE=bf16 keeps 8 bits of a score, and an fp16 answer shows the loss of the other 3."
    if _late(config) and s_type == "fp32":
        return "SOFTMAX=statistics feeds S to the tensor cores' registers in pairs of 16 bits: S_TYPE must not be fp32."
    if _late(config) and config["P_PLACE"] == "own":
        return "SOFTMAX=statistics writes no P: P_PLACE must be in_place, to do nothing."
    if s_type == "fp32" and config["P_PLACE"] == "in_place":
        return "P_PLACE=in_place needs S of 16 bits: over S_TYPE=fp32 a probability would fall on scores that are not read yet."
    if config["VECTOR_WIDTH"] * SCORE_BYTES[s_type] > 16:
        return f"VECTOR_WIDTH={config['VECTOR_WIDTH']} scores of S_TYPE={s_type} are more than the 16 bytes of a load."
    return None


def _why_wrong_tiles(config: KernelConfig) -> str | None:
    """What SOFTMAX=tiles and tiles_late cannot do, and genes that they leave nothing to do."""
    unused = {"S_TYPE": "fp16", "P_PLACE": "in_place", "THREADS_PER_ROW": 1, "VECTOR_WIDTH": 4, "KEPT_VECTORS": 1}
    if _merges_late(config):
        unused["ROWS_PER_BLOCK"] = 32
    for gene, value in unused.items():
        if config[gene] != value:
            return f"SOFTMAX={config['SOFTMAX']} writes no S and merges a row in one thread: {gene} must be {value}, to do nothing."
    if (keys := config["BLOCK_N"] // config["WARPS_N"]) % config["PV_BLOCK_K"]:
        return f"PV_BLOCK_K={config['PV_BLOCK_K']} keys do not divide the {keys} keys of a row that a warp of Q Kᵀ refers to one maximum."
    return None


def _why_redundant(problem: AttentionProblem, config: KernelConfig) -> str | None:
    """Configs that do on this problem what a smaller one does."""
    for gene, least, count, what in (
        ("BLOCK_M", 32, problem.seqlen_q, "queries"),
        ("PV_BLOCK_M", 16, problem.seqlen_q, "queries"),
        ("BLOCK_N", 32, problem.seqlen_k, "keys"),
        ("PV_BLOCK_K", 32, problem.seqlen_k, "keys"),
        ("BLOCK_K", 32, problem.head_dim, "columns"),
    ):
        if config[gene] > least and config[gene] >= 2 * count:
            return f"{gene}={config[gene]} for {count} {what} leaves half of the tile or more without work."
    if config["BLOCK_K"] > 32 and config["BLOCK_K"] // 2 >= problem.head_dim:
        return f"BLOCK_K={config['BLOCK_K']} is all {problem.head_dim} columns, as {config['BLOCK_K'] // 2} is."
    if (count := config["TILES_A_BLOCK"]) > 1 and count // 2 * config["BLOCK_N"] >= problem.seqlen_k:
        return f"TILES_A_BLOCK={count} is more than the tiles of {config['BLOCK_N']} keys that {problem.seqlen_k} keys fill."
    steps = math.ceil(problem.seqlen_k / config["PV_BLOCK_K"])
    if config["PV_STAGES"] > max(2, steps):
        return f"PV_STAGES={config['PV_STAGES']} is more than the {steps} steps of {config['PV_BLOCK_K']} keys."
    threads, width, kept = config["THREADS_PER_ROW"], config["VECTOR_WIDTH"], config["KEPT_VECTORS"]
    if threads > WARP and (threads // 2) * width >= problem.seqlen_k:
        return f"THREADS_PER_ROW={threads} with VECTOR_WIDTH={width} leave half of the threads without one of the {problem.seqlen_k} keys."
    if kept > 1 and kept // 2 * threads * width >= problem.seqlen_k:
        return (
            f"KEPT_VECTORS={kept} is more than the vectors that {problem.seqlen_k} keys give each of {threads} threads."
        )
    return None


def _wgmma_functions(problem: AttentionProblem, config: KernelConfig) -> str:
    if not uses_wgmma(config):
        return ""
    qk = wgmma_function("wgmma_qk", config["BLOCK_N"], problem.dtype, a_in_registers=False, b_transposed=False)
    return f"{qk}\n\n" + wgmma_function(
        "wgmma_pv", problem.head_dim, problem.dtype, a_in_registers=False, b_transposed=True
    )


def _score_map(problem: AttentionProblem, buffer: str, dtype: str, columns: int) -> TensorMap:
    """The map of chunks of 64 rows of S or P, of whose rows the first `columns` count."""
    row = score_stride(problem) * ELEMENT_BYTES
    shape = (columns, problem.seqlen_q, problem.heads, problem.batch)
    strides_bytes = (row, row * problem.seqlen_q, row * problem.seqlen_q * problem.heads)
    return TensorMap(buffer, dtype, shape, strides_bytes, (CHUNK_COLUMNS, CHUNK_COLUMNS, 1, 1))


class ThreeKernel:
    """The `Family` of `templates/three_kernel.cu.j2`."""

    name: ClassVar[str] = "three_kernel"
    summary: ClassVar[str] = "QKᵀ, softmax and PV in three launches, S and P in device memory; fp16 and bf16"
    devices: ClassVar[str] = "sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16")

    def why_unsupported(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if problem.dtype not in self.dtypes:
            return (
                f"three_kernel takes {' and '.join(self.dtypes)}, not {problem.dtype}: the tensor cores have no fp32."
            )
        if gpu.capability < (8, 0):
            return f"three_kernel needs mma.m16n8k16 and cp.async of sm_80 and newer, and {gpu.name} is {gpu.arch}."
        if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
            return f"three_kernel takes a head_dim of {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {problem.head_dim}."
        if problem.heads * problem.batch > MAX_GRID_YZ:
            return f"three_kernel takes at most {MAX_GRID_YZ} heads over all batches (grid y and z), not {problem.heads * problem.batch}."
        if _rows(problem) > MAX_ROWS:
            return f"three_kernel takes at most {MAX_ROWS} queries over all heads and batches, not {_rows(problem)}."
        return why_no_lse(self.name, problem)

    def why_invalid(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_wrong_shape(config)
            or _why_not_wgmma(config, gpu)
            or _why_no_overlap(config, gpu)
            or _why_wrong_scores(problem, config)
            or _why_redundant(problem, config)
            or why_too_big(problem, config, gpu)
        )

    def why_impossible(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return self.why_invalid(
            problem, config, gpu
        )  # its scratch grows with the lengths: no kernel for other problems

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        same = (
            "PRODUCT",
            "BLOCK_M",
            "BLOCK_N",
            "BLOCK_K",
            "WARPS_M",
            "WARPS_N",
            "TILES_A_BLOCK",
            "THREADS_PER_ROW",
            "ROWS_PER_BLOCK",
            "VECTOR_WIDTH",
            "KEPT_VECTORS",
            "PV_BLOCK_M",
            "PV_BLOCK_K",
            "PV_WARPS",
            "PV_STAGES",
        )
        return {name: config[name] for name in same} | {
            "PRODUCT": config["PRODUCT"],
            "WGMMA_FUNCTIONS": _wgmma_functions(problem, config),
            "ELEMENT": ELEMENT_TYPES[problem.dtype],
            "SCORE": ELEMENT_TYPES[problem.dtype if has_tile_softmax(config) else config["S_TYPE"]],
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
            "EXPONENTS_LATE": _late(config),
            "TILE_SOFTMAX": has_tile_softmax(config),
            "MERGE_LATE": _merges_late(config),
            "ZIGZAG": config["HEAD_ORDER"] == "zigzag",
            "DEPENDENT_LAUNCH": _overlaps(config),
            "TRIGGER_LATE": config["DEPENDENT_LAUNCH"] == "late",
            "SCORES_SMEM_BYTES": scores_smem_bytes(problem, config),
            "VALUES_SMEM_BYTES": values_smem_bytes(problem, config),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        heads = problem.heads * problem.batch
        key_blocks = math.ceil(problem.seqlen_k / (config["BLOCK_N"] * config["TILES_A_BLOCK"]))
        scores_grid = (key_blocks, math.ceil(problem.seqlen_q / config["BLOCK_M"]), heads)
        stride = Scalar("int32", score_stride(problem))
        lengths = tuple(Scalar("int32", n) for n in (problem.seqlen_q, problem.seqlen_k))
        p = Buffer("p" if config["P_PLACE"] == "own" else "s")
        # Where there are none of tiles or rows the kernels take the other's pointer and leave it.
        tiles = Buffer("tiles" if has_tile_softmax(config) else "rows")
        rows = tiles if _merges_late(config) else Buffer("rows")

        def heads_and_lengths(*tensors: str) -> tuple[KernelArg, ...]:
            strides = (Scalar("int64", stride) for t in tensors for stride in problem.strides(t)[:3])
            return *(Scalar("int32", n) for n in (problem.heads, problem.kv_heads)), *lengths, stride, *strides

        threads = tuple((count, 1, 1) for count in threads_a_block(config))
        scale = softmax_scale_log2(problem)
        scores_args = (Buffer("q"), Buffer("k"), Buffer("s"), tiles, *heads_and_lengths("q", "k"), scale)
        values_args = (p, tiles, rows, Buffer("v"), Buffer("o"), *heads_and_lengths("v", "o"))
        if uses_wgmma(config):
            counts = (*(Scalar("int32", n) for n in (problem.heads, problem.kv_heads)), *lengths)
            s_map = _score_map(
                problem, "s", problem.dtype if has_tile_softmax(config) else config["S_TYPE"], score_stride(problem)
            )
            scores_args = (
                tile_map(problem, "q", CHUNK_COLUMNS),
                tile_map(problem, "k", config["BLOCK_N"]),
                s_map,
                tiles,
                *counts,
                scale,
            )
            values_args = (
                _score_map(problem, p.name, problem.dtype, problem.seqlen_k),
                tile_map(problem, "v", config["PV_BLOCK_K"]),
                tiles,
                rows,
                Buffer("o"),
                *counts,
                *(Scalar("int64", stride) for stride in problem.strides("o")[:3]),
            )
        softmax_args = (rows, Scalar("int32", _rows(problem)), *lengths)
        softmax_args = (tiles, *softmax_args) if has_tile_softmax(config) else (Buffer("s"), p, *softmax_args, stride)
        softmax_grid = (math.ceil(_rows(problem) / config["ROWS_PER_BLOCK"]), 1, 1)
        values_grid = (math.ceil(problem.seqlen_q / config["PV_BLOCK_M"]), heads, 1)
        scores = KernelLaunch(
            "three_kernel_scores", scores_grid, threads[0], scores_smem_bytes(problem, config), scores_args
        )
        overlaps = _overlaps(config)
        softmax = KernelLaunch("three_kernel_softmax", softmax_grid, threads[1], 0, softmax_args, overlaps=overlaps)
        values_smem = values_smem_bytes(problem, config)
        values = KernelLaunch(
            "three_kernel_values", values_grid, threads[2], values_smem, values_args, overlaps=overlaps
        )
        return (scores, values) if _merges_late(config) else (scores, softmax, values)

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        """S, P unless it replaces S, and two floats a row, maximum and sum; with tiles those of every tile of a row too, with tiles_late
        these alone."""
        scores = _rows(problem) * score_stride(problem)
        own = {"p": scores * ELEMENT_BYTES} if config["P_PLACE"] == "own" else {}
        tiles = {"tiles": 8 * _rows(problem) * _references(problem, config)} if has_tile_softmax(config) else {}
        rows = {} if _merges_late(config) else {"rows": 8 * _rows(problem)}
        return {"s": scores * SCORE_BYTES[config["S_TYPE"]], **own, **tiles, **rows}
