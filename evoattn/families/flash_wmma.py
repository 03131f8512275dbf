"""Flash attention on tensor cores by nvcuda::wmma: one kernel, one pass over the keys, sm_80 and newer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import attention_args, why_no_lse
from evoattn.families.residency import WARP, why_not_resident, why_too_few_registers
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
ELEMENT_TYPES = {"fp16": "Fp16", "bf16": "Bf16"}
MAX_WARPS = 32
TILE = 16
"""Side of a wmma matrix."""
FRAGMENT_REGISTERS = 8
"""Of an operand or an accumulator of m16n16k16, a lane."""
FIXED_REGISTERS = 56
"""Addresses, bounds, the map of rows, fragments of K and V under way: from here on few spills in random configs (ptxas 13.0)."""
V_REGISTERS = 3
"""Of each tile of O that a lane keeps: its V on the way."""
PASS_REGISTERS = 6
"""Of each row of a lane in the softmax: maximum, sum, address, scores under way."""
MAX_GRID_YZ = 65535
"""Largest y and z of a grid (CUDA C++ Programming Guide, technical specifications)."""


def _warps(config: KernelConfig) -> int:
    return config["ROW_WARPS"] * config["COLUMN_WARPS"]


def _dim_tiles(problem: AttentionProblem) -> int:
    return math.ceil(problem.head_dim / TILE)


def _row_tiles(config: KernelConfig) -> int:
    """Tiles of 16 rows a warp."""
    return config["BLOCK_M"] // (TILE * config["ROW_WARPS"])


def smem_parts(problem: AttentionProblem, config: KernelConfig) -> dict[str, int]:
    """Bytes of dynamic shared memory by what they hold: a float a row; Q; the rings of K and V; S, in whose place P; O if it lives there.

    With O in fragments it takes the place of Q, K, V and S at the end, and counts only what it has over them.
    """
    block_m, block_n, padding = config["BLOCK_M"], config["BLOCK_N"], config["PADDING_BYTES"]
    row_bytes = _dim_tiles(problem) * TILE * 2 + padding
    o_bytes = block_m * (_dim_tiles(problem) * TILE * 4 + padding)
    parts = {
        "row factors": 4 * block_m,
        "Q": block_m * row_bytes,
        "K and V": 2 * config["STAGES"] * block_n * row_bytes,
        "S": block_m * (4 * block_n + padding),
    }
    if config["O_PLACE"] == "fragments":
        o_bytes = max(0, o_bytes - parts["Q"] - parts["K and V"] - parts["S"])
    return parts | {"O": o_bytes}


def smem_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """Dynamic shared memory of a block."""
    return sum(smem_parts(problem, config).values())


def _why_wrong_shape(problem: AttentionProblem, config: KernelConfig) -> str | None:
    """Tiles that do not divide over the warps, or warps without work."""
    block_m, block_n, row_warps, column_warps = (
        config[name] for name in ("BLOCK_M", "BLOCK_N", "ROW_WARPS", "COLUMN_WARPS")
    )
    if block_m % (TILE * row_warps):
        return (
            f"BLOCK_M={block_m} rows are {block_m // TILE} tiles of 16, which do not divide over ROW_WARPS={row_warps}."
        )
    if _warps(config) > MAX_WARPS:
        return f"ROW_WARPS={row_warps} times COLUMN_WARPS={column_warps} are {_warps(config)} warps; a block has at most {MAX_WARPS}."
    if column_warps > max(block_n // TILE, _dim_tiles(problem)):
        return f"COLUMN_WARPS={column_warps} leaves warps without any of the {block_n // TILE} tiles of S and {_dim_tiles(problem)} of O."
    lanes = config["THREADS_PER_ROW"]
    if block_n % (2 * lanes):
        return f"BLOCK_N={block_n} keys do not divide into pairs for THREADS_PER_ROW={lanes}."
    if config["COPY"] == "registers" and config["STAGES"] > 1:
        return f"STAGES={config['STAGES']} overlaps nothing with COPY=registers: the copy is over when the next product begins."
    return None


def _why_redundant(problem: AttentionProblem, config: KernelConfig) -> str | None:
    """Configs that do what a smaller one does."""
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    if block_m > TILE and block_m >= 2 * problem.seqlen_q:
        return f"BLOCK_M={block_m} for {problem.seqlen_q} queries leaves half of the block or more without work."
    if block_n > TILE and block_n >= 2 * problem.seqlen_k:
        return f"BLOCK_N={block_n} for {problem.seqlen_k} keys leaves half of the tile or more without work."
    tiles = math.ceil(problem.seqlen_k / block_n)
    if config["STAGES"] > tiles:
        return (
            f"STAGES={config['STAGES']} is more than the {tiles} tiles of {block_n} that {problem.seqlen_k} keys make."
        )
    return None


def registers_needed(problem: AttentionProblem, config: KernelConfig) -> int:
    """Estimate of the registers a thread below which ptxas spills: O and Q if they stay in fragments, S, the scores of a row, the rest."""
    row_tiles, dim_tiles = _row_tiles(config), _dim_tiles(problem)
    o_tiles = math.ceil(dim_tiles / config["COLUMN_WARPS"]) if config["O_PLACE"] == "fragments" else 1
    q_tiles = dim_tiles if config["Q_PLACE"] == "fragments" else 1
    passes = math.ceil(TILE * row_tiles * config["THREADS_PER_ROW"] / (WARP * config["COLUMN_WARPS"]))
    product = row_tiles * FRAGMENT_REGISTERS
    softmax = config["BLOCK_N"] // config["THREADS_PER_ROW"]
    kept = row_tiles * (o_tiles + q_tiles) * FRAGMENT_REGISTERS + V_REGISTERS * o_tiles
    return kept + max(product, softmax) + PASS_REGISTERS * passes + FIXED_REGISTERS


def _why_too_big(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
    """Shared memory, threads and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    blocks, warps, smem = config["BLOCKS_PER_SM"], _warps(config), smem_bytes(problem, config)
    if smem > gpu.smem_per_block:
        parts = " + ".join(f"{what} {size}" for what, size in smem_parts(problem, config).items() if size)
        return (
            f"The block needs {smem} bytes of shared memory ({parts}); {gpu.name} gives a block {gpu.smem_per_block}."
        )
    return why_not_resident(gpu, blocks, warps, smem) or why_too_few_registers(
        blocks, warps, registers_needed(problem, config)
    )


class FlashWmma:
    """The `Family` of `templates/flash_wmma.cu.j2`."""

    name: ClassVar[str] = "flash_wmma"
    summary: ClassVar[str] = "tensor cores by nvcuda::wmma m16n16k16, S and P in shared memory; fp16 and bf16"
    devices: ClassVar[str] = "sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = tuple(ELEMENT_TYPES)

    def why_unsupported(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if problem.dtype not in self.dtypes:
            return f"flash_wmma takes {' and '.join(self.dtypes)}, not {problem.dtype}: the tensor cores have no fp32."
        if gpu.capability < (8, 0):
            return f"flash_wmma needs cp.async and bf16 matrices of sm_80 and newer, and {gpu.name} is {gpu.arch}."
        if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
            return f"flash_wmma takes a head_dim of {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {problem.head_dim}."
        if max(problem.heads, problem.batch) > MAX_GRID_YZ:
            return f"flash_wmma takes at most {MAX_GRID_YZ} heads and batches (grid y and z), not {max(problem.heads, problem.batch)}."
        return why_no_lse(self.name, problem)

    def why_invalid(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_wrong_shape(problem, config)
            or _why_redundant(problem, config)
            or _why_too_big(problem, config, gpu)
        )

    def why_impossible(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_wrong_shape(problem, config)
            or _why_too_big(problem, config, gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        same = (
            "BLOCK_M",
            "BLOCK_N",
            "ROW_WARPS",
            "COLUMN_WARPS",
            "THREADS_PER_ROW",
            "STAGES",
            "PADDING_BYTES",
            "BLOCKS_PER_SM",
        )
        return {name: config[name] for name in same} | {
            "ELEMENT": ELEMENT_TYPES[problem.dtype],
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
            "ASYNC_COPY": config["COPY"] == "async",
            "Q_IN_FRAGMENTS": config["Q_PLACE"] == "fragments",
            "O_IN_SHARED": config["O_PLACE"] == "shared",
            "SMEM_BYTES": smem_bytes(problem, config),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        grid = (math.ceil(problem.seqlen_q / config["BLOCK_M"]), problem.heads, problem.batch)
        return (
            KernelLaunch(
                self.name, grid, (WARP * _warps(config), 1, 1), smem_bytes(problem, config), attention_args(problem)
            ),
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        return {}
