"""What a launch does that merges splits of the keys: see `evoattn.families.work`."""

import math
from collections.abc import Mapping

from evoattn.families.residency import WARP
from evoattn.families.work import LaunchWork, Step, tensor_bytes
from evoattn.model.problem import AttentionProblem

MERGE_THREADS = 128
"""Of a block, which merges one row."""
COLUMNS, AT_ONCE = 4, 8
"""Of O, that a thread merges; splits whose results it loads together."""
MERGE_WAIT, LOAD_WAIT = 1400, 700
"""Clocks: of a block's first loads, sums and stores; of each later round of loads."""
LAST_BLOCK_WAIT = 2500
"""Clocks until the sums of other blocks are there for the last one: a counter and their results in L2."""
REGISTERS, SMEM_BYTES = 32, 4096
"""Estimates, per thread and per block."""


def merge_work(
    kernel: str,
    problem: AttentionProblem,
    splits: int,
    scratch_bytes: float,
    genes: Mapping[str, float],
    overlaps: bool = False,
) -> LaunchWork:
    """The launch of `kernel`, with a block for each row of O, over `scratch_bytes` of partial results in fp32 and their
    maxima and sums. Groups of threads take a row's splits in turn."""
    dim = problem.head_dim_v
    taken = math.ceil(splits / max(1, MERGE_THREADS * COLUMNS // dim))
    rounds = math.ceil(taken / AT_ONCE)
    merge = Step(
        fp32=splits * dim * 2.0,
        special=MERGE_THREADS * ((AT_ONCE + 1.0) * rounds + 1),
        instructions=740.0 + 60 * taken,
        loaded_bytes=splits * (dim * 4 + 8) + dim * problem.element_bytes,
        waits=MERGE_WAIT + LOAD_WAIT * (rounds - 1),
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
