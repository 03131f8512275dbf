"""One answer of attention out of those over parts of its keys, by their log-sum-exps, in one launch."""

import math
from typing import Any, ClassVar

from evoattn.families.genes import gene
from evoattn.families.residency import WARP
from evoattn.families.row_kernels import RowGenes, RowKernels
from evoattn.families.work import LaunchWork, Step
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.merge import MERGE_OPERATIONS, NARROW, part_strides, rows_of
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

HELD = 128
"""Numbers of parts that a thread holds: more would spill."""
FIRST_WAIT, ROUND_WAIT = 900, 600
"""Clocks: until a block's first loads are there; of each round of loads after them."""


class MergeGenes(RowGenes):
    """The parameters of merge_parts."""

    BLOCK_M: int = gene("rows per block", (1, 2, 4, 8, 16, 32, 64))
    BLOCK_N: int = gene("parts that a thread loads together", (1, 2, 4, 8))
    THREADS: int = gene("threads per block", (32, 64, 128, 256))
    VECTOR_WIDTH: int = gene("columns per load", (4, 8))


class MergeParts(RowKernels):
    """The `Family` of `templates/merge_parts.cu.j2`. The mask and K/V heads change nothing."""

    name: ClassVar[str] = "merge_parts"
    genes = MergeGenes
    summary: ClassVar[str] = "one answer out of those over parts of the keys, by their log-sum-exps"
    operations: ClassVar[tuple[str, ...]] = MERGE_OPERATIONS
    writes_lse: ClassVar[bool] = True

    def rows(self, problem: AttentionProblem) -> int:
        return rows_of(problem)

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes = MergeGenes.of(config)
        if problem.head_dim % genes.VECTOR_WIDTH:
            return f"VECTOR_WIDTH={genes.VECTOR_WIDTH} does not divide the {problem.head_dim} columns of a row."
        lanes, columns = genes.lanes(problem.head_dim)
        if (genes.BLOCK_N + 1) * columns > HELD and genes.BLOCK_N > 1:
            return f"BLOCK_N={genes.BLOCK_N} parts of {columns} columns are more than the registers of a thread."
        if redundant and (reason := genes.why_idle(lanes)):
            return reason
        if redundant and genes.BLOCK_N > 1 and 2 * problem.seqlen_k <= genes.BLOCK_N:
            return f"BLOCK_N={genes.BLOCK_N} parts are loaded together, and there are {problem.seqlen_k}."
        return None

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        element = problem.element.cuda
        return {"PART": element if problem.op == NARROW else "Fp32", "ELEMENT": element}

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes, rows = MergeGenes.of(config), rows_of(problem)
        counts = problem.seqlen_k, rows, problem.heads, problem.seqlen_q
        strides = *part_strides(problem), *problem.strides("o")[:3]
        args: tuple[KernelArg, ...] = (
            *(Buffer(name) for name in ("parts", "part_sums", "o", "lse")),
            *(Scalar("int32", count) for count in counts),
            *(Scalar("int64", stride) for stride in strides),
        )
        return (KernelLaunch(self.name, (math.ceil(rows / genes.BLOCK_M), 1, 1), (genes.THREADS, 1, 1), 0, args),)

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        """A step is AT_ONCE parts of as many rows as the threads of a block take at a time."""
        genes = MergeGenes.of(config)
        lanes, columns = genes.lanes(problem.head_dim)
        at_a_time = max(1, min(genes.BLOCK_M, genes.THREADS // lanes))
        numbers = float(at_a_time * genes.BLOCK_N * problem.head_dim)
        parts, size = problem.inputs[0].bytes, problem.inputs[0].bytes / math.prod(problem.inputs[0].shape)
        step = Step(
            fp32=2.0 * numbers,
            special=at_a_time * lanes * (genes.BLOCK_N + 1.0),
            instructions=(2.0 + 1.0 / genes.VECTOR_WIDTH) * numbers / WARP + 8.0 * genes.THREADS / WARP,
            loaded_bytes=numbers * size,
            waits=ROUND_WAIT,
        )
        steps = math.ceil(genes.BLOCK_M / at_a_time) * math.ceil(problem.seqlen_k / genes.BLOCK_N)
        blocks, threads = math.ceil(rows_of(problem) / genes.BLOCK_M), genes.THREADS
        held = registers or min(255, 32 + (genes.BLOCK_N + 1) * columns)
        return (
            LaunchWork(
                self.name, blocks, threads, threads // WARP, 0, held, step, steps, steps, Step(waits=FIRST_WAIT),
                in_flight_bytes=numbers * size, read_bytes=float(parts),
                write_bytes=float(problem.outputs[0].bytes),
                genes={"vector bytes": size * genes.VECTOR_WIDTH, "stages": genes.BLOCK_N},
            ),
        )  # fmt: skip
