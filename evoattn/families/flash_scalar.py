"""Flash attention on CUDA cores: one kernel, one pass over the keys, any GPU of the table."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from evoattn.families.base import attention_args, why_no_lse
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import DTYPES, AttentionProblem
from evoattn.model.space import KernelConfig

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
ELEMENT_TYPES = {"fp16": "Fp16", "bf16": "Bf16", "fp32": "Fp32"}
WARP = 32
MAX_THREADS = 1024
MAX_REGISTERS = 255
MAX_VECTOR_BYTES = 16
MIN_ASYNC_BYTES = 4
"""The least that cp.async moves (PTX ISA)."""
P_WIDTH = 4
"""Floats a read of P, and the padding of its rows."""
FREE_PADDING, MAX_PADDING = 1.25, 1.5
"""Products P·V over those that head_dim needs: what a wider read of V is worth, and what is refused."""
MAX_BODY = 2048
"""Instructions in the body of one inner loop, 16 bytes each: 32 KB of the 128 KB instruction cache of an SM (Jia et al. 2018, for Volta);
NVRTC 13.0 compiles that in about 0.5 s, and takes 2-9 s for twice as much."""
FIXED_REGISTERS = 44
"""Addresses, loop counters, bounds and copies under way, such that fewer than 1 % of the accepted configs spill under ptxas 13.0."""
SEGMENTED_HEAD_DIM = 64
"""Beyond it an fp32 kernel keeps partial sums beside the scores (`SEGMENT` in the template)."""


def _threads(config: KernelConfig) -> int:
    return config["BLOCK_M"] // config["ROWS_PER_THREAD"] * config["THREADS_PER_ROW"]


def _smem_bytes(problem: AttentionProblem, config: KernelConfig) -> int:
    """Dynamic shared memory of a block in bytes: K and V of all stages, P in fp32, Q."""
    row_bytes = (problem.head_dim + config["PADDING"]) * problem.element_bytes
    rows = 2 * config["KV_STAGES"] * config["BLOCK_N"] + (0 if config["Q_IN_REGISTERS"] else config["BLOCK_M"])
    p_floats = config["BLOCK_M"] * (config["BLOCK_N"] + P_WIDTH) if config["P_IN_SHARED"] else 0
    return rows * row_bytes + 4 * p_floats


def _value_width(problem: AttentionProblem, config: KernelConfig) -> int:
    """Elements a read of V: VECTOR_WIDTH, halved until a row's threads pad head_dim by at most `FREE_PADDING`."""
    width = config["VECTOR_WIDTH"]
    while width > 1 and _padded(problem.head_dim, width * config["THREADS_PER_ROW"]) > FREE_PADDING * problem.head_dim:
        width //= 2
    return width


def _padded(count: int, step: int) -> int:
    return math.ceil(count / step) * step


def _outputs(problem: AttentionProblem, config: KernelConfig) -> int:
    """Elements of one output row that a thread holds."""
    lanes = config["THREADS_PER_ROW"]
    return _padded(problem.head_dim, _value_width(problem, config) * lanes) // lanes


def _loop_trips(problem: AttentionProblem, config: KernelConfig) -> tuple[int, int]:
    """Trips of the two loops that UNROLL unrolls: over head_dim in Q·Kᵀ, over keys in P·V; 1 where the loop is unrolled whole."""
    qk = 1 if config["Q_IN_REGISTERS"] else problem.head_dim // config["VECTOR_WIDTH"]
    pv = config["BLOCK_N"] // P_WIDTH if config["P_IN_SHARED"] else config["THREADS_PER_ROW"]
    return qk, pv


def _body_instructions(problem: AttentionProblem, config: KernelConfig) -> int:
    """Multiply-adds, conversions and loads in the larger of the two unrolled loop bodies."""
    rows, width, keys = (
        config["ROWS_PER_THREAD"],
        config["VECTOR_WIDTH"],
        config["BLOCK_N"] // config["THREADS_PER_ROW"],
    )
    conversions = 0 if problem.dtype == "fp32" else 1
    qk_trips, pv_trips = _loop_trips(problem, config)
    qk_elements = problem.head_dim // qk_trips * min(config["UNROLL"], qk_trips)
    qk_operands = keys if config["Q_IN_REGISTERS"] else keys + rows
    pv_keys = config["BLOCK_N"] // pv_trips * min(config["UNROLL"], pv_trips)
    pv_elements = pv_keys * _outputs(problem, config)
    value_width = _value_width(problem, config)
    return max(
        qk_elements * (rows * keys + qk_operands * conversions + qk_operands // width),
        pv_elements * (rows + conversions) + pv_elements // value_width + pv_keys * rows,
    )


def estimated_registers(problem: AttentionProblem, config: KernelConfig) -> int:
    """Registers a thread that a spill-free compile needs, from the arrays that live at once."""
    rows, width, unroll = config["ROWS_PER_THREAD"], config["VECTOR_WIDTH"], config["UNROLL"]
    scores = rows * config["BLOCK_N"] // config["THREADS_PER_ROW"]
    partial_sums = scores if problem.dtype == "fp32" and problem.head_dim > SEGMENTED_HEAD_DIM else 0
    q = rows * (problem.head_dim if config["Q_IN_REGISTERS"] else width * unroll)
    k_or_v = width + max(1, width * problem.element_bytes // 4) * unroll
    maxima_and_sums = 2 * rows
    loads_ahead = (unroll - 1) * scores // 8
    return (
        rows * _outputs(problem, config)
        + scores
        + partial_sums
        + q
        + k_or_v
        + maxima_and_sums
        + loads_ahead
        + FIXED_REGISTERS
    )


class FlashScalar:
    """Any lengths, grouped heads, three masks, fp16, bf16 and fp32, head_dim 16 to 256; fp32 arithmetic throughout."""

    name: ClassVar[str] = "flash_scalar"
    summary: ClassVar[str] = "Flash attention on CUDA cores: fp32 arithmetic, register tiles, K and V by cp.async."
    devices: ClassVar[str] = "any GPU, sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = DTYPES

    def why_unsupported(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
            return f"flash_scalar serves head_dim {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {problem.head_dim}."
        return why_no_lse(self.name, problem)

    def why_invalid(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return (
            self.why_unsupported(problem, gpu)
            or _why_shape(problem, config)
            or _why_no_effect(problem, config, gpu)
            or _why_resources(problem, config, gpu)
        )

    def why_impossible(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        return self.why_unsupported(problem, gpu) or _why_shape(problem, config) or _why_resources(problem, config, gpu)

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        return {
            "ELEMENT": ELEMENT_TYPES[problem.dtype],
            "HEAD_DIM": problem.head_dim,
            **problem.masking.constants(),
            "VALUE_WIDTH": _value_width(problem, config),
            "HEADS_FASTEST": config["BLOCK_ORDER"] == "heads",
            "SMEM_BYTES": _smem_bytes(problem, config),
            **{name: value for name, value in config.params.items() if name != "BLOCK_ORDER"},
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        """One launch; a block for each query tile of each head of each batch entry, in one dimension."""
        blocks = math.ceil(problem.seqlen_q / config["BLOCK_M"]) * problem.heads * problem.batch
        return (
            KernelLaunch(
                "flash_scalar",
                (blocks, 1, 1),
                (_threads(config), 1, 1),
                _smem_bytes(problem, config),
                attention_args(problem),
            ),
        )

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        return {}


def _why_shape(problem: AttentionProblem, config: KernelConfig) -> str | None:
    """Divisibility, thread counts, alignment, copies."""
    block_m, block_n, rows = config["BLOCK_M"], config["BLOCK_N"], config["ROWS_PER_THREAD"]
    lanes, width, padding = config["THREADS_PER_ROW"], config["VECTOR_WIDTH"], config["PADDING"]
    vector_bytes = width * problem.element_bytes
    if block_m % rows:
        return f"BLOCK_M={block_m} is no multiple of ROWS_PER_THREAD={rows}."
    threads = _threads(config)
    if threads % WARP or threads > MAX_THREADS:
        return (
            f"BLOCK_M={block_m} / ROWS_PER_THREAD={rows} · THREADS_PER_ROW={lanes} makes {threads} threads; "
            f"a block has a multiple of {WARP} up to {MAX_THREADS}."
        )
    if block_n % lanes:
        return f"BLOCK_N={block_n} keys do not divide over THREADS_PER_ROW={lanes} threads."
    if vector_bytes > MAX_VECTOR_BYTES:
        return f"VECTOR_WIDTH={width} of {problem.dtype} is {vector_bytes} bytes; one load moves at most {MAX_VECTOR_BYTES}."
    if padding % width:
        return f"PADDING={padding} elements leaves rows unaligned for vectors of VECTOR_WIDTH={width}."
    padded = _outputs(problem, config) * lanes
    if padded > MAX_PADDING * problem.head_dim:
        return f"THREADS_PER_ROW={lanes} pads head_dim {problem.head_dim} to {padded} in P·V, more than {MAX_PADDING} times."
    if config["KV_STAGES"] > 1 and vector_bytes < MIN_ASYNC_BYTES:
        return (
            f"KV_STAGES=2 needs cp.async, which moves {MIN_ASYNC_BYTES} bytes at least; "
            f"VECTOR_WIDTH={width} of {problem.dtype} is {vector_bytes}."
        )
    return None


def _why_no_effect(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
    """Genes that change nothing under the others: the same kernel would be tried twice."""
    unroll, blocks = config["UNROLL"], config["BLOCKS_PER_SM"]
    q_tiles = math.ceil(problem.seqlen_q / config["BLOCK_M"])
    if config["BLOCK_ORDER"] == "heads" and min(problem.heads, q_tiles) == 1:
        return f"BLOCK_ORDER=heads changes nothing with {problem.heads} heads and {q_tiles} query tiles."
    trips = max(_loop_trips(problem, config))
    if unroll > 1 and trips <= unroll // 2:
        return f"UNROLL={unroll} changes nothing over UNROLL={unroll // 2}: the loops make at most {trips} trips."
    if blocks > 1 and gpu.registers_per_sm // (blocks * _threads(config)) > MAX_REGISTERS:
        return f"BLOCKS_PER_SM={blocks} changes nothing: {_threads(config)} threads leave {MAX_REGISTERS} registers a thread anyway."
    return None


def _why_resources(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
    """Shared memory, threads and registers of the GPU, and the size of the code."""
    blocks, threads, smem = config["BLOCKS_PER_SM"], _threads(config), _smem_bytes(problem, config)
    if smem > gpu.smem_per_block:
        return f"Q, K, V and P take {smem} bytes of shared memory; a block of {gpu.name} has {gpu.smem_per_block}."
    if blocks > gpu.blocks_resident(0, threads, smem):
        return (
            f"BLOCKS_PER_SM={blocks} blocks of {threads} threads and {smem} bytes of shared memory do not fit one SM of {gpu.name} "
            f"({gpu.threads_per_sm} threads, {gpu.smem_per_sm} bytes, {gpu.smem_reserved_per_block} of them reserved a block)."
        )
    body = _body_instructions(problem, config)
    if body > MAX_BODY:
        return f"An unrolled loop body has about {body} instructions; over {MAX_BODY} the code outgrows the instruction cache."
    allowed = min(MAX_REGISTERS, gpu.registers_per_sm // (blocks * threads) // 8 * 8)
    needed = estimated_registers(problem, config)
    if needed > allowed:
        return f"About {needed} registers a thread are needed; {threads} threads and BLOCKS_PER_SM={blocks} leave {allowed}."
    return None
