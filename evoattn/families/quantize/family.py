"""Tensors of 16 bits as numbers of 8 bits with scales: a launch over parts of heads, or two where a scale is of more
than a part."""

import math
from typing import Any, ClassVar

from evoattn.families.genes import SINCE_HOPPER, gene
from evoattn.families.residency import WARP
from evoattn.families.row_kernels import RowGenes, RowKernels
from evoattn.families.work import LaunchWork, Step
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import NULL, STATIC_SMEM_LIMIT, Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.problem import AttentionProblem
from evoattn.model.quantize import QUANTIZE_OPERATIONS, SMOOTH, TURN, number_of
from evoattn.model.scales import BLOCK_ROWS, PER_BLOCK, PER_TOKEN
from evoattn.model.space import KernelConfig
from evoattn.model.turned import GROUP
from evoattn.model.variant import TURNED

SIZES = "sizes"
"""The scratch buffer: of what parts of heads have, the largest magnitude, or of each column least, most and sum."""
MOST_KEPT = 16
"""Registers of a thread that hold a block's rows: with 32 it took 1.2 to 1.5 times as long, with 64 twice (H100,
2026-11-27)."""
OF_BLOCKS = (PER_BLOCK, PER_TOKEN)
"""Scales of rows that one block has all of, whose largest magnitude no scratch buffer holds."""
ROOM = 1024
"""Bytes of shared memory for what threads tell one another."""


class QuantizeGenes(RowGenes):
    """The parameters of quantize."""

    BLOCK_M: int = gene("rows of one head per block", (16, 32, 64, 128, 256, 512))
    BLOCK_N: int = gene("there are no keys beside the rows", (1,))
    THREADS: int = gene("threads per block", (128, 256, 512, 1024))
    VECTOR_WIDTH: int = gene("elements per load; as many bytes per store", (4, 8))
    UNROLL: int = gene("rows of a thread that are loaded together", (1, 2, 4))


class Quantize(RowKernels):
    """The `Family` of `templates/quantize.cu.j2`. The mask and the number of keys change nothing."""

    name: ClassVar[str] = "quantize"
    genes = QuantizeGenes
    summary: ClassVar[str] = "Numbers of 8 bits and their scales, of tensors of 16 bits."
    devices: ClassVar[str] = "any GPU, sm_80 and newer"
    operations: ClassVar[tuple[str, ...]] = QUANTIZE_OPERATIONS
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "e4m3")
    variants: ClassVar[tuple[str, ...]] = ("kv", "scales", TURNED)

    def rows(self, problem: AttentionProblem) -> int:
        return problem.batch * problem.heads * problem.seqlen_q

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if (problem.op == TURN) != (problem.element.bytes == 1):
            return f"{self.name} makes 8 bits of 16; op={TURN} alone takes {problem.dtype}."
        if problem.head_dim % 8:
            return f"{self.name} takes a head_dim of a multiple of 8, not {problem.head_dim}."
        if problem.turned and problem.head_dim % GROUP:
            return f"{self.name} turns a head_dim of a multiple of {GROUP}, not {problem.head_dim}."
        return super().refuse(problem, gpu)

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = QuantizeGenes.of(config)
        lanes, columns = genes.lanes(problem.head_dim)
        if problem.op == SMOOTH and 4 * (genes.THREADS * columns + problem.head_dim + WARP) > STATIC_SMEM_LIMIT:
            return f"THREADS={genes.THREADS} threads of {columns} sums each are over {STATIC_SMEM_LIMIT} bytes."
        if problem.scales == PER_BLOCK and genes.BLOCK_M != BLOCK_ROWS:
            return f"BLOCK_M={genes.BLOCK_M}: with scales=block a block takes the {BLOCK_ROWS} rows that share one."
        if problem.turned and genes.BLOCK_M * problem.head_dim > STATIC_SMEM_LIMIT - ROOM:
            return f"BLOCK_M={genes.BLOCK_M} rows of {problem.head_dim} bytes are over {STATIC_SMEM_LIMIT - ROOM}."
        if columns * genes.UNROLL * (4 if problem.op == SMOOTH else 1) > 128:
            return f"UNROLL={genes.UNROLL} rows of {columns} columns are more than the registers of a thread."
        if problem.scales == PER_BLOCK and (kept := _kept(problem, genes)) > MOST_KEPT:
            return f"THREADS={genes.THREADS}: {kept} registers of rows are more than the {MOST_KEPT} of a thread."
        if redundant and genes.UNROLL > 1 and problem.scales == PER_BLOCK:
            return f"UNROLL={genes.UNROLL}: with scales=block all rows of a thread are loaded together."
        if redundant and genes.UNROLL > 1 and genes.BLOCK_M * lanes < genes.THREADS * genes.UNROLL:
            return f"UNROLL={genes.UNROLL}: a thread has fewer of the {genes.BLOCK_M} rows."
        return genes.why_idle(lanes, 0) if redundant else None

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        number = number_of(problem)
        return {
            "ELEMENT": problem.answer.cuda,
            "NUMBER": number.cuda,
            "LARGEST": f"{number.largest}f",
            "TURNED": problem.turned,
            "PER_TOKEN": problem.scales == PER_TOKEN,
            "PER_BLOCK": problem.scales == PER_BLOCK,
            "SMOOTH": problem.op == SMOOTH,
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes, parts = QuantizeGenes.of(config), _parts(problem, QuantizeGenes.of(config))
        grid, block = (problem.batch * problem.heads * parts, 1, 1), (genes.THREADS, 1, 1)
        made = problem.outputs[0].strides if problem.turned else problem.strides("o")
        x, numbers = (tuple(Scalar("int64", n) for n in strides[:3]) for strides in (problem.strides("q"), made))
        counts = tuple(Scalar("int32", n) for n in (problem.heads, problem.seqlen_q, parts))
        if problem.op == TURN:
            return (KernelLaunch(TURN, grid, block, 0, (Buffer("x"), Buffer("numbers"), *counts, *x, *numbers)),)
        of_scale = _heads_of_scale(problem)
        sizes: KernelArg = NULL if problem.scales in OF_BLOCKS else Buffer(SIZES)
        mean: KernelArg = Buffer("mean") if problem.op == SMOOTH else NULL
        own = int(_is_own(problem, parts))
        args = (
            *(Buffer("x"), Buffer("numbers"), Buffer("scale"), mean, sizes, *counts),
            *(Scalar("int32", of_scale), Scalar("int32", own), *x, *numbers),
        )
        two = not own and problem.scales not in OF_BLOCKS
        early = two and gpu.arch in SINCE_HOPPER and not problem.turned  # whose blocks took 1.1 of their time so
        last = KernelLaunch("quantize", grid, block, 0, args, overlaps=early)
        first = KernelLaunch("quantize_sizes", grid, block, 0, (Buffer("x"), Buffer(SIZES), *counts, *x))
        return (first, last) if two else (last,)

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        if problem.scales in OF_BLOCKS or problem.op == TURN:
            return {}
        stats = 3 * problem.head_dim if problem.op == SMOOTH else 1
        return {SIZES: 4 * stats * problem.batch * problem.heads * _parts(problem, QuantizeGenes.of(config))}

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        """A step is a row of each thread: loads, a comparison or a product of each element, and a store."""
        genes, parts = QuantizeGenes.of(config), _parts(problem, QuantizeGenes.of(config))
        lanes, columns = genes.lanes(problem.head_dim)
        rows, elements = genes.THREADS // lanes, genes.THREADS // lanes * problem.head_dim
        tensor = float(problem.inputs[0].bytes)
        two = not _is_own(problem, parts) and problem.scales not in OF_BLOCKS and problem.op != TURN
        names = ("quantize_sizes", "quantize") if two else (TURN if problem.op == TURN else "quantize",)
        steps = math.ceil(min(genes.BLOCK_M, problem.seqlen_q) / rows)
        made = []
        for kernel in names:
            written = elements if kernel != "quantize_sizes" else 0.0
            step = Step(
                fp32=(3.0 if written else 2.0) * elements, instructions=(4.0 if written else 3.0) * elements / WARP,
                loaded_bytes=problem.element_bytes * elements + written, waits=600.0 / genes.UNROLL,
            )  # fmt: skip
            stats = 12.0 * problem.head_dim if problem.op == SMOOTH else 4.0
            ends = Step(loaded_bytes=stats * (parts * _heads_of_scale(problem) if written else 1), waits=900.0)
            made.append(
                LaunchWork(
                    kernel, problem.batch * problem.heads * parts, genes.THREADS, genes.THREADS // WARP, 0,
                    registers or 24 + columns * genes.UNROLL, step, steps, steps, ends,
                    in_flight_bytes=problem.element_bytes * elements * genes.UNROLL,
                    read_bytes=tensor,
                    write_bytes=tensor / problem.element_bytes if written else 0.0,
                    genes={"unroll": genes.UNROLL, "vector bytes": problem.element_bytes * genes.VECTOR_WIDTH},
                )
            )  # fmt: skip
        return tuple(made)


def _parts(problem: AttentionProblem, genes: QuantizeGenes) -> int:
    """Blocks of a head's rows."""
    return math.ceil(problem.seqlen_q / genes.BLOCK_M)


def _heads_of_scale(problem: AttentionProblem) -> int:
    return problem.group_size if problem.scales else problem.batch * problem.heads


def _kept(problem: AttentionProblem, genes: QuantizeGenes) -> int:
    """Registers of a thread's part of a block's rows."""
    lanes, columns = genes.lanes(problem.head_dim)
    return math.ceil(genes.BLOCK_M * lanes / genes.THREADS) * columns // 2


def _is_own(problem: AttentionProblem, parts: int) -> bool:
    """Whether a block has all that shares its scale."""
    return problem.scales not in OF_BLOCKS and parts * _heads_of_scale(problem) == 1
