"""What the three blocks of three_kernel take: threads, shared memory, registers; and that it is more than the GPU has."""

from __future__ import annotations

import math

from evoattn.families.residency import WARP, register_cap
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

ELEMENT_BYTES = 2
CHUNK_COLUMNS, CHUNK_ROW_BYTES = 64, 128
"""A tile in shared memory for wgmma is chunks of 64 columns: the widest box of the 128-byte swizzle."""
SCORES_REGISTERS = 40
"""Addresses and fragments of Q and K beside the accumulators of a thread; as the next two, no spill in random configs from here on."""
VALUES_REGISTERS = 48
FACTOR_REGISTERS = 72
"""More of them where P V rescales O for each tile."""
SOFTMAX_REGISTERS = 24
WGMMA_REGISTERS = 40


def uses_wgmma(config: KernelConfig) -> bool:
    """Whether both products are by wgmma, else by mma.sync."""
    return config["PRODUCT"] == "wgmma"


def has_tile_softmax(config: KernelConfig) -> bool:
    """Whether Q Kᵀ writes probabilities relative to the maxima of each tile."""
    return config["SOFTMAX"] in ("tiles", "tiles_late")


def _row_bytes(problem: AttentionProblem) -> int:
    """Bytes of a row of Q, K, V or O in shared memory: head_dim up to whole k16 steps."""
    return math.ceil(problem.head_dim / 16) * 16 * ELEMENT_BYTES


def _chunked_row_bytes(problem: AttentionProblem) -> int:
    """Bytes of a row of Q, K, V or O in whole chunks."""
    return math.ceil(problem.head_dim / CHUNK_COLUMNS) * CHUNK_ROW_BYTES


def threads_a_block(config: KernelConfig) -> tuple[int, int, int]:
    """Threads a block of Q Kᵀ, softmax, P V."""
    return (
        WARP * config["WARPS_M"] * config["WARPS_N"],
        config["THREADS_PER_ROW"] * config["ROWS_PER_BLOCK"],
        WARP * config["PV_WARPS"],
    )


def scores_smem_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """Dynamic shared memory of a block of Q Kᵀ: whole rows of Q and K; with wgmma S (that of a
    block's only tile in their place), two stages of K for several tiles, and barriers."""
    if uses_wgmma(config):
        stages = min(2, config["TILES_A_BLOCK"])
        tiles = (config["BLOCK_M"] + stages * config["BLOCK_N"]) * _chunked_row_bytes(problem)
        s = config["BLOCK_M"] * config["BLOCK_N"] * ELEMENT_BYTES
        return (max(tiles, s) if stages == 1 else tiles + s) + 8 * (1 + stages)
    return (config["BLOCK_M"] + config["BLOCK_N"]) * _row_bytes(problem)


def values_smem_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """Dynamic shared memory of a block of P V: the ring of P and V, in whose place later O; with wgmma a barrier a stage."""
    block_m, block_k = config["PV_BLOCK_M"], config["PV_BLOCK_K"]
    if uses_wgmma(config):
        row_bytes = _chunked_row_bytes(problem)
        ring = config["PV_STAGES"] * block_k * (block_m * ELEMENT_BYTES + row_bytes)
        return max(ring, block_m * row_bytes) + 8 * config["PV_STAGES"]
    ring = config["PV_STAGES"] * block_k * (block_m * ELEMENT_BYTES + _row_bytes(problem))
    return max(ring, block_m * _row_bytes(problem))


def registers_needed(problem: AttentionProblem, config: KernelConfig) -> tuple[int, int, int]:
    """Estimates of the registers a thread of Q Kᵀ, softmax and P V below which ptxas spills: accumulators or kept scores, and the rest."""
    kept = config["KEPT_VECTORS"] * config["VECTOR_WIDTH"]
    if uses_wgmma(config):
        return (
            config["BLOCK_N"] // 2 + WGMMA_REGISTERS,
            SOFTMAX_REGISTERS + kept,
            problem.head_dim // 2 + WGMMA_REGISTERS,
        )
    row_tiles, key_tiles = config["BLOCK_M"] // (16 * config["WARPS_M"]), config["BLOCK_N"] // (8 * config["WARPS_N"])
    value_tiles = config["PV_BLOCK_M"] // (16 * config["PV_WARPS"])
    factors = FACTOR_REGISTERS if has_tile_softmax(config) else 0
    return (
        row_tiles * (4 * key_tiles + 4) + SCORES_REGISTERS,
        SOFTMAX_REGISTERS + kept,
        value_tiles * (problem.head_dim // 2 + 8) + VALUES_REGISTERS + factors,
    )


def why_too_big(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
    """Shared memory and registers of the three blocks against the limits of the GPU."""
    for what, bytes_, genes in (
        ("Q Kᵀ", scores_smem_bytes(problem, config), ("BLOCK_M", "BLOCK_N")),
        ("P V", values_smem_bytes(problem, config), ("PV_BLOCK_M", "PV_BLOCK_K", "PV_STAGES")),
    ):
        if bytes_ > gpu.smem_per_block:
            tile = " ".join(f"{name}={config[name]}" for name in genes)
            return f"{what} with {tile} needs {bytes_} bytes of shared memory; {gpu.name} gives a block {gpu.smem_per_block}."
    for what, (needed, threads) in zip(
        ("Q Kᵀ", "softmax", "P V"), zip(registers_needed(problem, config), threads_a_block(config))
    ):
        cap = register_cap(math.ceil(threads / WARP), 1)
        if needed > cap:
            return (
                f"A thread of {what} needs about {needed} registers, and a block of {threads} threads leaves it {cap}."
            )
    return None
