"""The launch that asks a predicate of PARTIAL blocks once, for all heads of a kernel that reads block lists."""

import math

from evoattn.families.block_list import BITS, Packed, list_given, packed_mask
from evoattn.families.given import passed
from evoattn.families.residency import WARP
from evoattn.families.variants import variant_given
from evoattn.families.work import LaunchWork, Step
from evoattn.model.block_list import blocks_of_rows, parse_blocks, partial_share
from evoattn.model.launch import KernelArg, KernelLaunch, Scalar
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import cost

KERNEL = "pack_mask"
THREADS, REGISTERS, MOST_BLOCKS = 128, 40, 4096
"""Of a block, of a thread by estimate, and of a launch where its rows leave the choice."""
FIRST_WAIT = 500
"""Clocks of a block's first loads, and of its last stores."""


def packed_bytes(problem: AttentionProblem) -> dict[str, int]:
    """The scratch of `pack_launches`."""
    bits = packed_mask(problem)
    return {BITS: bits.bytes} if bits else {}


def pack_launches(problem: AttentionProblem) -> tuple[KernelLaunch, ...]:
    """The launch before the kernel, if there is one; its block takes PARTIAL blocks of keys of one block of rows."""
    bits = packed_mask(problem)
    if bits is None:
        return ()
    return (KernelLaunch(KERNEL, _grid(problem, bits), (THREADS, 1, 1), 0, _args(problem, bits)),)


def _grid(problem: AttentionProblem, bits: Packed) -> tuple[int, int, int]:
    """Warps for all pieces of a row of blocks that has most of them; lists of another mask may have more, which the
    same warps take in turn."""
    answers, mask = bits.batches * bits.heads, parse_blocks(problem.blocks)
    rows, most = mask.blocks(problem.band)[0], blocks_of_rows(*problem.block_mask)[1]
    shares = math.ceil(most * math.ceil(mask.rows / WARP) * math.ceil(mask.keys / WARP) / (THREADS // WARP))
    return rows, max(1, min(shares, MOST_BLOCKS // (rows * answers))), answers


def _args(problem: AttentionProblem, bits: Packed) -> tuple[KernelArg, ...]:
    counts = (bits.heads, problem.seqlen_q, problem.seqlen_k)
    return *(Scalar("int32", n) for n in counts), *passed(variant_given(problem), list_given(problem))


def pack_work(problem: AttentionProblem) -> tuple[LaunchWork, ...]:
    """What `pack_launches` has to do."""
    bits = packed_mask(problem)
    if bits is None or problem.shown is None:
        return ()
    mask, (rows, shares, answers) = parse_blocks(problem.blocks), _grid(problem, bits)
    mean, most = (n / shares * partial_share(*problem.block_mask) for n in blocks_of_rows(*problem.block_mask))
    pairs, (special, fp32, instructions) = mask.rows * mask.keys, cost(problem.shown)
    step = Step(
        fp32=pairs * fp32, special=pairs * special, instructions=pairs / WARP * (instructions + 4), waits=FIRST_WAIT
    )
    warps = THREADS // WARP
    blocks = rows * shares * answers
    return (LaunchWork(KERNEL, blocks, THREADS, warps, 0, REGISTERS, step, mean, most, Step(waits=FIRST_WAIT)),)
