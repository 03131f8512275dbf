"""What a launch does that merges splits of the keys: see `evoattn.families.work`."""

from __future__ import annotations

from collections.abc import Mapping

from evoattn.families.work import WARP, LaunchWork, Step, tensor_bytes
from evoattn.model.problem import AttentionProblem

MERGE_THREADS = 128
"""Of a block, which merges one row."""
REGISTERS, SMEM_BYTES = 32, 4096
"""Estimates, per thread and per block."""


def merge_work(
    kernel: str,
    problem: AttentionProblem,
    splits: int,
    scratch_bytes: float,
    waits: float,
    genes: Mapping[str, float],
    overlaps: bool = False,
) -> LaunchWork:
    """The launch of `kernel`, with a block for each row of O, over `scratch_bytes` of partial results in fp32 and their
    maxima and sums. `waits`: clocks that a warp waits in it."""
    dim = problem.head_dim_v
    merge = Step(
        fp32=splits * dim * 2.0,
        instructions=splits * dim / 4 / WARP * 6 + 100,
        loaded_bytes=splits * (dim * 4 + 8) + dim * problem.element_bytes,
        waits=waits,
    )
    return LaunchWork(
        kernel,
        problem.heads * problem.seqlen_q * problem.batch,
        MERGE_THREADS,
        MERGE_THREADS // WARP,
        SMEM_BYTES,
        REGISTERS,
        Step(),
        0.0,
        0.0,
        merge,
        in_flight_bytes=MERGE_THREADS * 16.0,
        read_bytes=scratch_bytes,
        write_bytes=tensor_bytes(problem, "o"),
        scratch_bytes=scratch_bytes,
        overlaps=overlaps,
        genes=genes,
    )
