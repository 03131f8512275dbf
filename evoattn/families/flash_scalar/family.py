"""Flash attention on CUDA cores: one kernel, one pass over the keys, any GPU of the table."""

import math
from typing import Any, ClassVar

from evoattn.families.base import Family, attention_args
from evoattn.families.flash_scalar.resources import (
    MAX_PADDING,
    FlashScalarGenes,
    block_threads,
    body_instructions,
    estimated_registers,
    launch_work,
    loop_trips,
    outputs,
    smem_bytes,
    width_of_values,
)
from evoattn.families.large_head.family import has_recipe
from evoattn.families.residency import MAX_REGISTERS, WARP
from evoattn.families.work import LaunchWork
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, Value

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
RECIPE: dict[str, Value] = {"BLOCK_N": 32, "THREADS_PER_ROW": 16}
"""Of rows of the same bits in every batch."""


class FlashScalar(Family):
    """Any lengths, grouped heads, three masks, fp16, bf16 and fp32, head_dim 16 to 256; fp32 arithmetic throughout."""

    name: ClassVar[str] = "flash_scalar"
    genes = FlashScalarGenes
    summary: ClassVar[str] = "Flash attention on CUDA cores: fp32 arithmetic, register tiles, K and V by cp.async."
    devices: ClassVar[str] = "any GPU, sm_80 and newer"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "fp32")

    def may_win(self, problem: AttentionProblem) -> bool:
        """In 16 bits tensor cores are many times as fast."""
        return problem.dtype == "fp32"

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if not MIN_HEAD_DIM <= problem.head_dim <= MAX_HEAD_DIM:
            return f"flash_scalar serves head_dim {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, not {problem.head_dim}."
        return None

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = FlashScalarGenes.of(config)
        return (
            why_shape(problem, genes)
            or (why_no_effect(problem, genes, gpu) if redundant else None)
            or why_resources(problem, genes, gpu)
        )

    def recipe(self, problem: AttentionProblem, gpu: GpuSpec) -> dict[str, Value]:
        return dict(RECIPE) if problem.dtype == "fp32" and not has_recipe(problem) else {}

    def row_bits(self, problem: AttentionProblem, config: KernelConfig) -> tuple[Value, ...] | None:
        """A row meets its tiles of keys, which begin at multiples of BLOCK_N, from the first to the last, and adds up
        products of keys and of columns in their order; sums are of THREADS_PER_ROW threads."""
        genes = FlashScalarGenes.of(config)
        return genes.BLOCK_N, genes.THREADS_PER_ROW

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        genes = FlashScalarGenes.of(config)
        return {
            "VALUE_WIDTH": width_of_values(problem, genes),
            "HEADS_FASTEST": genes.BLOCK_ORDER == "heads",
            "SMEM_BYTES": smem_bytes(problem, genes),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        """One launch; a block for each query tile of each head of each batch entry, in one dimension."""
        genes = FlashScalarGenes.of(config)
        blocks = math.ceil(problem.seqlen_q / genes.BLOCK_M) * problem.heads * problem.batch
        return (
            KernelLaunch(
                "flash_scalar",
                (blocks, 1, 1),
                (block_threads(genes), 1, 1),
                smem_bytes(problem, genes),
                attention_args(problem),
            ),
        )

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        return launch_work(problem, FlashScalarGenes.of(config), registers)


MAX_THREADS = 1024
MAX_VECTOR_BYTES = 16
MIN_ASYNC_BYTES = 4
"""The least that cp.async moves (PTX ISA)."""
MAX_BODY = 2048
"""Instructions in the body of one inner loop, 16 bytes each: 32 KB of the 128 KB instruction cache of an SM (Jia et al.
2018, for Volta); NVRTC 13.0 compiles that in about 0.5 s, and takes 2-9 s for twice as much."""


def why_shape(problem: AttentionProblem, genes: FlashScalarGenes) -> str | None:
    """Divisibility, thread counts, alignment, copies."""
    block_m, block_n, rows = genes.BLOCK_M, genes.BLOCK_N, genes.ROWS_PER_THREAD
    lanes, width, padding = genes.THREADS_PER_ROW, genes.VECTOR_WIDTH, genes.PADDING
    vector_bytes = width * problem.element_bytes
    if block_m % rows:
        return f"BLOCK_M={block_m} is no multiple of ROWS_PER_THREAD={rows}."
    threads = block_threads(genes)
    if threads % WARP or threads > MAX_THREADS:
        return (
            f"BLOCK_M={block_m} / ROWS_PER_THREAD={rows} · THREADS_PER_ROW={lanes} makes {threads} threads; "
            f"a block has a multiple of {WARP} up to {MAX_THREADS}."
        )
    if block_n % lanes:
        return f"BLOCK_N={block_n} keys do not divide over THREADS_PER_ROW={lanes} threads."
    if vector_bytes > MAX_VECTOR_BYTES:
        return (
            f"VECTOR_WIDTH={width} of {problem.dtype} is {vector_bytes} bytes; one load moves at most "
            f"{MAX_VECTOR_BYTES}."
        )
    if padding % width:
        return f"PADDING={padding} elements leaves rows unaligned for vectors of VECTOR_WIDTH={width}."
    padded = outputs(problem, genes) * lanes
    if padded > MAX_PADDING * problem.head_dim:
        return (
            f"THREADS_PER_ROW={lanes} pads head_dim {problem.head_dim} to {padded} in P·V, more than {MAX_PADDING} "
            "times."
        )
    if genes.KV_STAGES > 1 and vector_bytes < MIN_ASYNC_BYTES:
        return (
            f"KV_STAGES=2 needs cp.async, which moves {MIN_ASYNC_BYTES} bytes at least; "
            f"VECTOR_WIDTH={width} of {problem.dtype} is {vector_bytes}."
        )
    return None


def why_no_effect(problem: AttentionProblem, genes: FlashScalarGenes, gpu: GpuSpec) -> str | None:
    """Genes that change nothing under the others: the same kernel would be tried twice."""
    unroll, blocks = genes.UNROLL, genes.BLOCKS_PER_SM
    q_tiles = math.ceil(problem.seqlen_q / genes.BLOCK_M)
    if genes.BLOCK_ORDER == "heads" and min(problem.heads, q_tiles) == 1:
        return f"BLOCK_ORDER=heads changes nothing with {problem.heads} heads and {q_tiles} query tiles."
    trips = max(loop_trips(problem, genes))
    if unroll > 1 and trips <= unroll // 2:
        return f"UNROLL={unroll} changes nothing over UNROLL={unroll // 2}: the loops make at most {trips} trips."
    if blocks > 1 and gpu.registers_per_sm // (blocks * block_threads(genes)) > MAX_REGISTERS:
        return (
            f"BLOCKS_PER_SM={blocks} changes nothing: {block_threads(genes)} threads leave {MAX_REGISTERS} registers "
            "per thread anyway."
        )
    return None


def why_resources(problem: AttentionProblem, genes: FlashScalarGenes, gpu: GpuSpec) -> str | None:
    """Shared memory, threads and registers of the GPU, and the size of the code."""
    blocks, threads, smem = genes.BLOCKS_PER_SM, block_threads(genes), smem_bytes(problem, genes)
    if smem > gpu.smem_per_block:
        return f"Q, K, V and P take {smem} bytes of shared memory; a block of {gpu.name} has {gpu.smem_per_block}."
    if blocks > gpu.blocks_resident(0, threads, smem):
        return (
            f"BLOCKS_PER_SM={blocks} blocks of {threads} threads and {smem} bytes of shared memory do not fit one SM "
            f"of {gpu.name} ({gpu.threads_per_sm} threads, {gpu.smem_per_sm} bytes, {gpu.smem_reserved_per_block} of "
            "them reserved a block)."
        )
    body = body_instructions(problem, genes)
    if body > MAX_BODY:
        return (
            f"An unrolled loop body has about {body} instructions; over {MAX_BODY} the code outgrows the instruction "
            "cache."
        )
    allowed = min(MAX_REGISTERS, gpu.registers_per_sm // (blocks * threads) // 8 * 8)
    needed = estimated_registers(problem, genes)
    if needed > allowed:
        return (
            f"About {needed} registers per thread are needed; {threads} threads and BLOCKS_PER_SM={blocks} leave "
            f"{allowed}."
        )
    return None
