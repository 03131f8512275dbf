"""Flash attention on tensor cores by mma.sync m16n8k16: one kernel, one pass over the keys, sm_80 and newer."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import attention_args, why_no_lse
from evoattn.families.residency import WARP, why_not_resident, why_same_code, why_too_few_registers
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
ELEMENT_TYPES = {"fp16": "Fp16", "bf16": "Bf16"}
ELEMENT_BYTES = 2
CHUNK_BYTES = 16
MAX_WARPS = 16
FIXED_REGISTERS = 44
"""Addresses, counters, bounds, fragments of K and V under way."""
ROW_TILE_REGISTERS = 8
"""Shifts, sums and the fragment of P of one tile of 16 rows."""
LAZY_REGISTERS = {"mma": 4, "add": 12}
"""What the way back of a lazy shift keeps alive for one tile of 16 rows, by ROW_SUM."""
MAX_WARP_KEYS = 128
"""Beyond it ptxas spills at any register count, and scores alone take half of a thread's registers."""
MAX_GRID_YZ = 65535
"""Largest y and z of a grid (CUDA C++ Programming Guide, technical specifications)."""


def _row_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """Bytes of a row of Q, K, V or O in shared memory: head_dim up to whole k16 steps, and a padding chunk without swizzle."""
    padding = CHUNK_BYTES if config["SMEM_LAYOUT"] == "padded" else 0
    return math.ceil(problem.head_dim / 16) * 16 * ELEMENT_BYTES + padding


def _warps(config: KernelConfig) -> int:
    return config["WARPS"] * config["KEY_WARPS"]


def _stages(config: KernelConfig) -> tuple[int, int]:
    """Tiles of K and of V in shared memory."""
    return config["STAGES"], config["STAGES"] - (config["SCHEDULE"] == "split_short_v")


def smem_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """Dynamic shared memory of a block: Q and the rings of K and V; in their place later O and the partial results of the key warps."""
    row_bytes = _row_bytes(problem, config)
    q_bytes = 0 if config["Q_PLACE"] == "direct" else config["BLOCK_M"] * row_bytes
    loop = q_bytes + sum(_stages(config)) * config["BLOCK_N"] * row_bytes
    o_bytes = config["BLOCK_M"] * row_bytes if config["O_STORE"] == "shared" else 0
    # O, two shifts and two sums of each lane in fp32: head_dim / 2 + 4 floats a lane for every 16 rows.
    merge = (config["KEY_WARPS"] - 1) * config["BLOCK_M"] // 16 * WARP * (problem.head_dim // 2 + 4) * 4
    return max(loop, max(q_bytes, o_bytes) + merge)


def _why_wrong_shape(config: KernelConfig) -> str | None:
    """Tiles that are not whole mma tiles of each warp, or too many warps."""
    block_m, block_n, warps, key_warps = (config[name] for name in ("BLOCK_M", "BLOCK_N", "WARPS", "KEY_WARPS"))
    if block_m % (16 * warps):
        return f"BLOCK_M={block_m} rows do not divide into tiles of 16 for WARPS={warps}."
    if block_n % (16 * key_warps):
        return f"BLOCK_N={block_n} keys do not divide into steps of 16 for KEY_WARPS={key_warps}."
    if block_n // key_warps > MAX_WARP_KEYS:
        return f"BLOCK_N={block_n} over KEY_WARPS={key_warps} is more than {MAX_WARP_KEYS} keys a warp."
    if _warps(config) > MAX_WARPS:
        return f"WARPS={warps} times KEY_WARPS={key_warps} is over {MAX_WARPS} warps, with which a thread has 128 registers."
    return None


def _why_wrong_ring(config: KernelConfig) -> str | None:
    """A ring too short for its schedule."""
    stages, schedule = config["STAGES"], config["SCHEDULE"]
    if stages == 1 and schedule != "split":
        return f"SCHEDULE={schedule} needs STAGES of at least 2: with one tile of K and V only split has room to copy the next."
    return None


def _why_redundant(problem: AttentionProblem, config: KernelConfig) -> str | None:
    """Configs that do what a smaller one does."""
    block_m, block_n, key_warps, order = (config[name] for name in ("BLOCK_M", "BLOCK_N", "KEY_WARPS", "BLOCK_ORDER"))
    rows, tiles = math.ceil(problem.seqlen_q / block_m), math.ceil(problem.seqlen_k / block_n)
    if block_m > 16 and block_m >= 2 * problem.seqlen_q:
        return f"BLOCK_M={block_m} for {problem.seqlen_q} queries leaves half of the block or more without work."
    if block_n > 16 * key_warps and block_n >= 2 * problem.seqlen_k:
        return f"BLOCK_N={block_n} for {problem.seqlen_k} keys leaves half of the tile or more without work."
    if problem.seqlen_k <= block_n // key_warps * (key_warps - 1):
        return f"KEY_WARPS={key_warps}: with {problem.seqlen_k} keys in a tile of {block_n} the last key warp never sees one."
    if tiles == 1 and (config["SCHEDULE"] != "split" or config["RESCALE"] != "always"):
        return f"All {problem.seqlen_k} keys are one tile of {block_n}: SCHEDULE and RESCALE must be split and always, to do nothing."
    if config["STAGES"] > tiles:
        return (
            f"STAGES={config['STAGES']} is more than the {tiles} tiles of {block_n} that {problem.seqlen_k} keys make."
        )
    if order.endswith("reversed") and not problem.causal:
        return f"BLOCK_ORDER={order} only matters with a causal mask: without one all row blocks take the same time."
    if order != "rows" and (rows == 1 or (order == "heads" and problem.heads * problem.batch == 1)):
        return f"BLOCK_ORDER={order} is the same order as rows for {rows} row blocks of {problem.heads * problem.batch} heads."
    return None


def registers_needed(problem: AttentionProblem, config: KernelConfig) -> int:
    """Estimate of the registers a thread below which ptxas spills.

    A tile of 16 rows has head_dim / 2 accumulators of O, the warp's keys / 2 of S (of two tiles if overlapped) and head_dim / 4 registers
    of Q if Q stays there (kernel-facts §4). The rest was fitted to NVRTC 13.0 on sm_89 and sm_90a: of 340 random configs let through 4
    spilled.
    """
    row_tiles = config["BLOCK_M"] // (16 * config["WARPS"])
    scores = config["BLOCK_N"] // config["KEY_WARPS"] // 2 * (2 if config["SCHEDULE"] == "overlapped" else 1)
    q = 0 if config["Q_PLACE"] == "shared" else 4 * math.ceil(problem.head_dim / 16)
    lazy = LAZY_REGISTERS[config["ROW_SUM"]] if config["RESCALE"] == "lazy" else 0
    return row_tiles * (problem.head_dim // 2 + scores + q + lazy + ROW_TILE_REGISTERS) + FIXED_REGISTERS


def _why_too_big(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
    """Grid, shared memory, threads and registers against the limits of the GPU and of BLOCKS_PER_SM."""
    rows = math.ceil(problem.seqlen_q / config["BLOCK_M"])
    if config["BLOCK_ORDER"].startswith("heads") and rows > MAX_GRID_YZ:
        return f"BLOCK_ORDER={config['BLOCK_ORDER']} puts {rows} row blocks in grid z, which ends at {MAX_GRID_YZ}."
    blocks, warps, smem = config["BLOCKS_PER_SM"], _warps(config), smem_bytes(problem, config)
    if smem > gpu.smem_per_block:
        return f"The block needs {smem} bytes of shared memory; {gpu.name} gives a block {gpu.smem_per_block}."
    return (
        why_not_resident(gpu, blocks, warps, smem)
        or why_same_code(blocks, warps)
        or why_too_few_registers(blocks, warps, registers_needed(problem, config))
    )


class FlashMma:
    """The `Family` of `templates/flash_mma.cu.j2`."""

    name: ClassVar[str] = "flash_mma"
    summary: ClassVar[str] = "tensor cores by mma.sync m16n8k16, ldmatrix and cp.async; fp16 and bf16"
    devices: ClassVar[str] = "sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = tuple(ELEMENT_TYPES)

    def why_unsupported(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if problem.dtype not in self.dtypes:
            return f"flash_mma takes {' and '.join(self.dtypes)}, not {problem.dtype}: the tensor cores have no fp32."
        if gpu.capability < (8, 0):
            return f"flash_mma needs mma.m16n8k16 and cp.async of sm_80 and newer, and {gpu.name} is {gpu.arch}."
        if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
            return f"flash_mma takes a head_dim of {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {problem.head_dim}."
        if max(problem.heads, problem.batch) > MAX_GRID_YZ:
            return f"flash_mma takes at most {MAX_GRID_YZ} heads and batches (grid y and z), not {max(problem.heads, problem.batch)}."
        return why_no_lse(self.name, problem)

    def why_invalid(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_wrong_shape(config)
            or _why_wrong_ring(config)
            or _why_redundant(problem, config)
            or _why_too_big(problem, config, gpu)
        )

    def why_impossible(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_wrong_shape(config)
            or _why_wrong_ring(config)
            or _why_too_big(problem, config, gpu)
        )

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        order = config["BLOCK_ORDER"]
        k_stages, v_stages = _stages(config)
        same = ("BLOCK_M", "BLOCK_N", "WARPS", "KEY_WARPS", "BLOCKS_PER_SM")
        return {name: config[name] for name in same} | {
            "ELEMENT": ELEMENT_TYPES[problem.dtype],
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
            "SCHEDULE": config["SCHEDULE"].removesuffix("_short_v").upper(),
            "K_STAGES": k_stages,
            "V_STAGES": v_stages,
            "SWIZZLED": config["SMEM_LAYOUT"] == "swizzled",
            "Q_PLACE": config["Q_PLACE"].upper(),
            "RESCALE": config["RESCALE"].upper(),
            "SUM_BY_MMA": config["ROW_SUM"] == "mma",
            "O_THROUGH_SHARED": config["O_STORE"] == "shared",
            "HEADS_FASTEST": order.startswith("heads"),
            "ROWS_REVERSED": order.endswith("reversed"),
            "SMEM_BYTES": smem_bytes(problem, config),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        rows = math.ceil(problem.seqlen_q / config["BLOCK_M"])
        heads_fastest = config["BLOCK_ORDER"].startswith("heads")
        grid = (problem.heads, problem.batch, rows) if heads_fastest else (rows, problem.heads, problem.batch)
        return (
            KernelLaunch(
                self.name, grid, (WARP * _warps(config), 1, 1), smem_bytes(problem, config), attention_args(problem)
            ),
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        return {}
