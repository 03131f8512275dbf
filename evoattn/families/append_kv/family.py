"""New keys and values into caches, plain or of pages, and a rotary embedding of keys and queries, in one launch."""

import math
from typing import Any, ClassVar

from evoattn.families.genes import gene
from evoattn.families.residency import WARP
from evoattn.families.row_kernels import RowGenes, RowKernels
from evoattn.families.work import LaunchWork, Step
from evoattn.model.append import APPEND_OPERATIONS, PAIRS, new_rows, turned_columns
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import NULL, Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

VECTOR_BYTES = 16
"""Of a load, at most."""
FIRST_WAIT, ROW_WAIT = 1500, 600
"""Clocks: until a block knows where its first row goes, and of each row after it."""


class AppendGenes(RowGenes):
    """The parameters of append_kv."""

    BLOCK_M: int = gene("heads of rows per block: of queries, of new keys and new values", (1, 2, 4, 8, 16, 32, 64))
    BLOCK_N: int = gene("there are no keys beside the rows", (1,))
    THREADS: int = gene("threads per block", (32, 64, 128, 256))
    VECTOR_WIDTH: int = gene("columns per load", (2, 4, 8))


class AppendKv(RowKernels):
    """The `Family` of `templates/append_kv.cu.j2`. A mask says where queries stand, and nothing else."""

    name: ClassVar[str] = "append_kv"
    genes = AppendGenes
    summary: ClassVar[str] = "new keys and values into caches, and a rotary embedding"
    operations: ClassVar[tuple[str, ...]] = APPEND_OPERATIONS
    variants: ClassVar[tuple[str, ...]] = ("value_dim", "seqused", "page")

    def rows(self, problem: AttentionProblem) -> int:
        """Heads of all tokens that are read: of queries that turn, of new keys and of new values."""
        heads = (problem.heads if turned_columns(problem) else 0) + 2 * problem.kv_heads
        return problem.batch * problem.seqlen_q * heads

    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        genes, turned = AppendGenes.of(config), turned_columns(problem)
        width = genes.VECTOR_WIDTH
        if width * problem.element_bytes > VECTOR_BYTES:
            return f"VECTOR_WIDTH={width} columns are more than the {VECTOR_BYTES} bytes of a load."
        if problem.head_dim % width or problem.head_dim_v % width:
            return f"VECTOR_WIDTH={width} does not divide the {problem.head_dim} and {problem.head_dim_v} columns."
        if (turned if problem.op == PAIRS else turned // 2) % width:
            return f"VECTOR_WIDTH={width} does not divide the columns that turn, {turned}, or their half."
        return genes.why_idle(_lanes(problem, genes)) if redundant else None

    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        return {
            "TURNED": bool(turned_columns(problem)),
            "PAIRS": problem.op == PAIRS,
            "MOVES": problem.causal,
            "PAGED": bool(problem.page),
        }

    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        genes, turned = AppendGenes.of(config), turned_columns(problem)
        rotary: dict[str, KernelArg] = {name: Buffer(name) if turned else NULL for name in ("q", "o", "cos", "sin")}
        counts = (
            *(problem.batch * problem.seqlen_q, problem.seqlen_q, problem.heads, problem.kv_heads),
            *((problem.table_pages * problem.page, problem.page) if problem.page else (problem.seqlen_k, 0)),
            *((problem.shape("k")[0], problem.table_pages) if problem.page else (0, 0)),
            turned // 2,
        )
        strides = (
            *problem.strides("q")[:3],
            *(stride for name in "qkv" for stride in new_rows(problem, name)[1][:3]),
            *(stride for name in "kv" for stride in problem.strides(name)[:3]),
        )
        args: tuple[KernelArg, ...] = (
            *(rotary["q"], rotary["o"]),
            *(Buffer(name) for name in ("new_k", "new_v", "k_cache", "v_cache")),
            *(rotary["cos"], rotary["sin"]),
            *(Buffer("seqused") if problem.seqused else NULL, Buffer("table") if problem.page else NULL),
            *(Scalar("int32", count) for count in counts),
            *(Scalar("int64", stride) for stride in strides),
        )
        grid = (math.ceil(self.rows(problem) / genes.BLOCK_M), 1, 1)
        return (KernelLaunch(self.name, grid, (genes.THREADS, 1, 1), 0, args),)

    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        """A step is as many rows as the threads of a block take at a time."""
        genes = AppendGenes.of(config)
        at_a_time = max(1, min(genes.BLOCK_M, genes.THREADS // _lanes(problem, genes)))
        numbers = float(at_a_time * max(problem.head_dim, problem.head_dim_v))
        step = Step(
            fp32=3.0 * numbers, instructions=(6.0 + 4.0 / genes.VECTOR_WIDTH) * numbers / WARP,
            loaded_bytes=2.0 * numbers * problem.element_bytes, waits=ROW_WAIT,
        )  # fmt: skip
        steps = math.ceil(genes.BLOCK_M / at_a_time)
        return (
            LaunchWork(
                self.name, math.ceil(self.rows(problem) / genes.BLOCK_M), genes.THREADS, genes.THREADS // WARP, 0,
                registers or 40 + 4 * genes.VECTOR_WIDTH, step, steps, steps, Step(waits=FIRST_WAIT),
                in_flight_bytes=numbers * problem.element_bytes, read_bytes=problem.bytes / 2,
                write_bytes=problem.bytes / 2,
                genes={"vector bytes": problem.element_bytes * genes.VECTOR_WIDTH},
            ),
        )  # fmt: skip


def _lanes(problem: AttentionProblem, genes: RowGenes) -> int:
    """Threads of a row."""
    return genes.lanes(max(problem.head_dim, problem.head_dim_v))[0]
