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
from evoattn.model.quantize import QUANTIZE_OPERATIONS, SAMPLED, SMOOTH, TOGETHER, TURN, number_of
from evoattn.model.scales import BLOCK_ROWS, PER_BLOCK, PER_TOKEN
from evoattn.model.space import KernelConfig
from evoattn.model.turned import GROUP
from evoattn.model.variant import TURNED

SIZES = "sizes"
"""The scratch buffer: the largest magnitude of parts of heads."""
MOST_KEPT = 32
"""Registers of a thread that hold a block's rows."""
OF_BLOCKS = (PER_BLOCK, PER_TOKEN)
"""Scales of rows that one block has all of, whose largest magnitude no scratch buffer holds."""
OTHERS = ("v", "v_numbers", "v_scale")
"""Of a pair what its second tensor is and becomes."""
ROOM = 1024
"""Bytes of shared memory for what threads tell one another."""


class QuantizeGenes(RowGenes):
    """The parameters of quantize."""

    BLOCK_M: int = gene("rows of one head per block", (16, 32, 64, 128, 256, 512))
    BLOCK_N: int = gene("there are no keys beside the rows", (1,))
    THREADS: int = gene("threads per block", (128, 256, 512, 1024))
    VECTOR_WIDTH: int = gene("elements per load; as many bytes per store", (4, 8))

    def layout(self, problem: AttentionProblem, columns: int, turned: bool) -> tuple[int, int, int]:
        """(threads of a row, columns of it that each has, rows that it has), as `Rows` of the template."""
        vectors = math.ceil(columns / self.VECTOR_WIDTH)
        most = WARP if problem.scales == PER_TOKEN else self.THREADS
        lanes, tall = min(most, 1 << max(0, vectors - 1).bit_length()), GROUP if turned else 1
        times = math.ceil(self.BLOCK_M / (self.THREADS // lanes * tall))
        return lanes, math.ceil(vectors / lanes) * self.VECTOR_WIDTH, times * tall


class Quantize(RowKernels):
    """The `Family` of `templates/quantize.cu.j2`. The mask and the number of keys change nothing."""

    name: ClassVar[str] = "quantize"
    genes = QuantizeGenes
    summary: ClassVar[str] = "Numbers of 8 bits and their scales, of tensors of 16 bits."
    devices: ClassVar[str] = "any GPU, sm_80 and newer"
    operations: ClassVar[tuple[str, ...]] = QUANTIZE_OPERATIONS
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "e4m3")
    variants: ClassVar[tuple[str, ...]] = ("kv", "scales", "value_dim", TURNED)

    def rows(self, problem: AttentionProblem) -> int:
        return problem.batch * problem.heads * problem.seqlen_q

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if (problem.op == TURN) != (problem.element.bytes == 1):
            return f"{self.name} makes 8 bits of 16; op={TURN} alone takes {problem.dtype}."
        for dim, turned in _tensors(problem):
            if dim % (GROUP if turned else 8):
                words = (
                    f"turns a head_dim of a multiple of {GROUP}" if turned else "takes a head_dim of a multiple of 8"
                )
                return f"{self.name} {words}, not {dim}."
        return super().refuse(problem, gpu)

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = QuantizeGenes.of(config)
        if problem.scales == PER_BLOCK and genes.BLOCK_M != BLOCK_ROWS:
            return f"BLOCK_M={genes.BLOCK_M}: with scales=block a block takes the {BLOCK_ROWS} rows that share one."
        busy, room = 0, STATIC_SMEM_LIMIT - ROOM
        if problem.op == SMOOTH:  # sums of all threads and the mean
            lanes, columns, _ = genes.layout(problem, problem.head_dim, False)
            room -= 4 * (genes.THREADS * columns + problem.head_dim)
            if room < 0:
                return (
                    f"THREADS={genes.THREADS} threads of {columns} sums each are over {STATIC_SMEM_LIMIT - ROOM} bytes."
                )
        for dim, turned in _tensors(problem):
            lanes, columns, rows = genes.layout(problem, dim, turned)
            if turned and genes.BLOCK_M * dim > room:
                return f"BLOCK_M={genes.BLOCK_M} rows of {dim} bytes are over {room}."
            if (kept := rows * columns * problem.element_bytes // 4) > MOST_KEPT:
                return f"THREADS={genes.THREADS}: {kept} registers of rows are more than the {MOST_KEPT} of a thread."
            busy = max(busy, genes.BLOCK_M * lanes // (GROUP if turned else 1))
        if redundant and busy < genes.THREADS:
            return f"THREADS={genes.THREADS} are more than the {genes.BLOCK_M} rows of a block have work for."
        return None

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        number = number_of(problem)
        return {
            "ELEMENT": problem.answer.cuda,
            "NUMBER": number.cuda,
            "LARGEST": f"{number.largest}f",
            "HEAD_DIM_V": problem.head_dim_v,
            "PAIR": problem.op in TOGETHER,
            "TURNED": problem.turned,
            "TURNS": problem.op == TURN,
            "PER_TOKEN": problem.scales == PER_TOKEN,
            "PER_BLOCK": problem.scales == PER_BLOCK,
            "SMOOTH": problem.op == SMOOTH,
            "SAMPLED": SAMPLED,
        }

    def why_outdated(self, config: KernelConfig, source: str) -> str | None:
        if "constexpr bool SMOOTH = true;" in source and "SAMPLED" not in source:
            return "Its mean is of all rows of one tensor, and takes more memory than today's launches give."
        return super().why_outdated(config, source)

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes, parts = QuantizeGenes.of(config), _parts(problem, QuantizeGenes.of(config))
        tensors = len(problem.inputs)
        grid, block = (problem.batch * problem.heads * parts, tensors, 1), (genes.THREADS, 1, 1)
        lies = {
            one.name: tuple(Scalar("int64", n) for n in one.strides[:3]) for one in (*problem.inputs, *problem.outputs)
        }
        counts = tuple(Scalar("int32", n) for n in (problem.heads, problem.seqlen_q, parts))
        x, numbers, none = lies["x"], lies["numbers"], (Scalar("int64", 0),) * 3
        if problem.op == TURN:
            return (KernelLaunch(TURN, grid, block, 0, (Buffer("x"), Buffer("numbers"), *counts, *x, *numbers)),)
        named: tuple[KernelArg, ...] = tuple(Buffer(name) if name in lies else NULL for name in OTHERS)
        sizes: KernelArg = NULL if problem.scales in OF_BLOCKS else Buffer(SIZES)
        mean: KernelArg = Buffer("mean") if problem.op == SMOOTH else NULL
        own = _is_own(problem, parts)
        args = (
            *(Buffer("x"), Buffer("numbers"), Buffer("scale"), *named, mean, sizes, *counts),
            *(Scalar("int32", _heads_of_scale(problem)), Scalar("int32", int(own)), *x, *numbers),
            *(lies.get("v", none) + lies.get("v_numbers", none)),
        )
        two = not own and problem.scales not in OF_BLOCKS
        last = KernelLaunch("quantize", grid, block, 0, args, overlaps=two and gpu.arch in SINCE_HOPPER)
        sizes_of = (Buffer("x"), named[0], Buffer(SIZES), *counts, *x, *lies.get("v", none))
        return (KernelLaunch("quantize_sizes", grid, block, 0, sizes_of), last) if two else (last,)

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        if problem.scales in OF_BLOCKS or problem.op == TURN:
            return {}
        heads = problem.batch * problem.heads * len(problem.inputs)
        return {SIZES: 4 * heads * _parts(problem, QuantizeGenes.of(config))}

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        """A step is all rows of a block: loads, a comparison and a product of each element, and a store."""
        genes, parts = QuantizeGenes.of(config), _parts(problem, QuantizeGenes.of(config))
        dim, turned = _tensors(problem)[-1]
        _, columns, rows = genes.layout(problem, dim, turned)
        elements, tensors = min(genes.BLOCK_M, problem.seqlen_q) * dim, problem.inputs
        sampled = SAMPLED * problem.head_dim / 2 if problem.op == SMOOTH else 0  # by one block of two
        tensor = float(sum(one.bytes for one in tensors))
        two = not _is_own(problem, parts) and problem.scales not in OF_BLOCKS and problem.op != TURN
        names = ("quantize_sizes", "quantize") if two else (TURN if problem.op == TURN else "quantize",)
        blocks, made = problem.batch * problem.heads * parts * len(tensors), []
        for kernel in names:
            written = elements if kernel != "quantize_sizes" else 0.0
            step = Step(
                fp32=(2.0 if written else 0.5) * elements, instructions=(4.0 if written else 1.5) * elements / WARP,
                loaded_bytes=problem.element_bytes * (elements + sampled) + written, waits=300.0 + 1.5 * genes.THREADS,
            )  # fmt: skip
            ends = Step(loaded_bytes=4.0 * (parts * _heads_of_scale(problem) if written else 1), waits=900.0)
            made.append(
                LaunchWork(
                    kernel, blocks, genes.THREADS, genes.THREADS // WARP, 0, registers or 32 + rows * columns // 2,
                    step, 1, 1, ends,
                    in_flight_bytes=problem.element_bytes * elements,
                    read_bytes=tensor,
                    write_bytes=tensor / problem.element_bytes if written else 0.0,
                    genes={"vector bytes": problem.element_bytes * genes.VECTOR_WIDTH},
                )
            )  # fmt: skip
        return tuple(made)


def _parts(problem: AttentionProblem, genes: QuantizeGenes) -> int:
    """Blocks of a head's rows."""
    return math.ceil(problem.seqlen_q / genes.BLOCK_M)


def _heads_of_scale(problem: AttentionProblem) -> int:
    return problem.group_size if problem.scales else problem.batch * problem.heads


def _tensors(problem: AttentionProblem) -> tuple[tuple[int, bool], ...]:
    """(head_dim, whether its numbers are turned) of each tensor."""
    if problem.op not in TOGETHER:
        return ((problem.head_dim, problem.turned),)
    return (problem.head_dim, False), (problem.head_dim_v, problem.turned)


def _is_own(problem: AttentionProblem, parts: int) -> bool:
    """Whether a block has all that shares its scale."""
    return problem.scales not in OF_BLOCKS and parts * _heads_of_scale(problem) == 1
