"""How long a compiled kernel should take, from counted instructions and the GPU's rates: a rank, never a time.

The interpreter counts what one block does for two small problems; the difference is what a K/V tile costs, the rest
what a block costs. Scaled to the whole problem, these counts keep the units of an SM busy (issue slots,
special-function units, shared memory, …), and make a chain of waits for each warp; the blocks that fit on an SM share
the units and hide each other's waits. `reports/performance.md` has the rank correlation with measured times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from evoattn.backends.interpreter import InterpreterBackend
from evoattn.correctness.reference import torch_dtype
from evoattn.families.built import BuiltKernel
from evoattn.families.residency import WARP, register_cap
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.ptx import Counters

SCHEDULERS = 4
INT_LANES = 64
"""Clock rates of an SM: CUDA C++ Programming Guide, "Arithmetic Instructions" for compute capability 8.x and 9.0."""

# Fitted by non-negative least squares of relative errors to 906 measured kernels of flash_scalar and flash_mma on five
# problems (H100, 2026-11-21). Busy tensor cores, conversions and L2 traffic came out as 0: what bounds these kernels is
# the chain of waits. Left out one at a time, the five problems are ranked with a Spearman correlation of 0.85 to 0.93.
BUSY = {"issue": 0.22, "fp32": 0.18, "int": 0.34, "special": 0.42, "shared": 0.46, "barriers": 7.4}
"""Clocks of an SM for each clock that a unit is busy, for each barrier that a warp reaches."""
CHAIN = {"fp32": 0.77, "tensor": 6.9, "shuffles": 10.6, "memory": 2.3, "barriers": 102.0}
"""Clocks that a warp waits for each instruction (`tensor`: for each clock of the unit)."""
BLOCK_CLOCKS, LAUNCH_CLOCKS = 3360.0, 1620.0
"""Clocks for the first loads and last stores of a block, and for the launch."""


@dataclass(frozen=True)
class Work:
    """What one launch does, in counts: a block costs `fixed`, and `tile` for each K/V tile that it visits."""

    fixed: Counters
    tile: Counters
    tiles: float
    """K/V tiles that a block visits, on average over the grid."""
    most_tiles: int
    """K/V tiles of the block that visits most of them."""
    blocks: int
    threads: int
    smem_bytes: int
    registers: int


def _key_tiles(problem: AttentionProblem, block_m: int, block_n: int) -> list[int]:
    """K/V tiles that each row block of one head visits."""
    tiles = []
    for first in range(0, problem.seqlen_q, block_m):
        last = min(first + block_m, problem.seqlen_q)
        keys = problem.masking.visible_keys(first, last, problem.seqlen_q, problem.seqlen_k)
        tiles.append(math.ceil(keys.stop / block_n) - keys.start // block_n if keys else 0)
    return tiles


def _probes(problem: AttentionProblem, block_m: int, block_n: int) -> tuple[AttentionProblem, AttentionProblem]:
    """Two small problems of one head whose numbers of blocks and of tiles are not proportional."""
    one = problem.with_(batch=1, heads=1, kv_heads=1)
    if problem.masking.queries_to_see_all(2 * block_n) > 1:  # only a square shows full tiles to this mask
        side = math.lcm(block_m, block_n)
        return one.with_(seqlen_q=side, seqlen_k=side), one.with_(seqlen_q=2 * side, seqlen_k=2 * side)
    return one.with_(seqlen_q=block_m, seqlen_k=2 * block_n), one.with_(seqlen_q=block_m, seqlen_k=4 * block_n)


def count_work(kernel: BuiltKernel, problem: AttentionProblem) -> Work:
    """Counts of the blocks of `problem`. Raises `NotInterpreted` or `LaunchError` as the interpreter does."""
    genes = kernel.family.genes(kernel.config)
    block_m, block_n = genes.BLOCK_M, genes.BLOCK_N
    counts: list[Counters] = []
    blocks: list[int] = []
    tiles: list[int] = []
    for probe in _probes(problem, block_m, block_n):
        counts.append(
            InterpreterBackend().profile(kernel.compiled, kernel.launches(probe), _zero_buffers(kernel, probe))
        )
        blocks.append(math.ceil(probe.seqlen_q / block_m))
        tiles.append(sum(_key_tiles(probe, block_m, block_n)))
    determinant = blocks[0] * tiles[1] - blocks[1] * tiles[0]
    a_tile = (counts[1] * blocks[0] - counts[0] * blocks[1]) * (1 / determinant)
    a_block = (counts[0] * tiles[1] - counts[1] * tiles[0]) * (1 / determinant)
    visited = _key_tiles(problem, block_m, block_n)
    launch, *others = kernel.launches(problem)
    # The compiler tells the most of all kernels in a source. Where that is more than this launch can have, it is
    # another kernel's.
    registers = (
        min(kernel.compiled.info.registers, register_cap(math.ceil(launch.threads / WARP), 1))
        if others
        else kernel.compiled.info.registers
    )
    return Work(
        a_block,
        a_tile,
        sum(visited) / len(visited),
        max(visited),
        len(visited) * problem.batch * problem.heads,
        launch.threads,
        launch.smem_bytes,
        registers,
    )


def _zero_buffers(kernel: BuiltKernel, problem: AttentionProblem) -> dict[str, torch.Tensor]:
    dtype = torch_dtype(problem)
    buffers = {t: torch.zeros(math.prod(problem.shape(t)), dtype=dtype) for t in "qkvo"}
    buffers |= {name: torch.zeros(math.prod(shape)) for name, shape in problem.term_shapes.items()}
    return buffers | {name: torch.zeros(size, dtype=torch.uint8) for name, size in kernel.workspace(problem).items()}


def unit_clocks(counts: Counters, gpu: GpuSpec) -> dict[str, float]:
    """Clocks for which these counts keep each unit of an SM busy."""
    return {
        "issue": counts.issue_slots / SCHEDULERS,
        "fp32": counts.fp32 * WARP / gpu.fp32_lanes,
        "int": counts.int_ops * WARP / INT_LANES,
        "special": counts.special * WARP / gpu.exp2_per_clock,
        "shared": counts.shared_wavefronts,
        "barriers": counts.barriers,
    }


def chain_clocks(counts: Counters, warps: float, gpu: GpuSpec) -> dict[str, float]:
    """What one warp waits for in turn, a warp's share of the counts: instructions, or clocks of the unit where it has
    one to itself."""
    return {
        "fp32": counts.fp32 / warps,
        "tensor": counts.tensor_flops / gpu.tensor_flops_per_clock / warps,
        "shuffles": counts.shuffles / warps,
        "memory": counts.memory_ops / warps,
        "barriers": counts.barriers / warps,
    }


def relative_cost(work: Work, gpu: GpuSpec) -> float | None:
    """The estimate in clocks of one SM, meaningful only against other estimates of the same problem and GPU. None if no
    block fits on an SM.

    Busy units add up over the blocks of the fullest SM; latency adds up over the waves in which they run, the last of
    them as long as the longest block.
    """
    resident = gpu.blocks_resident(work.registers, work.threads, work.smem_bytes)
    if not resident:
        return None
    blocks_of_an_sm = math.ceil(work.blocks / gpu.sm_count)
    waves = math.ceil(blocks_of_an_sm / resident)
    warps = work.threads / WARP
    mean, longest = (work.fixed + work.tile * tiles for tiles in (work.tiles, work.most_tiles))
    busy = sum(BUSY[unit] * clocks for unit, clocks in unit_clocks(mean, gpu).items())
    chains = [
        sum(CHAIN[name] * clocks for name, clocks in chain_clocks(c, warps, gpu).items()) + BLOCK_CLOCKS
        for c in (mean, longest)
    ]
    return busy * blocks_of_an_sm + chains[0] * (waves - 1) + chains[1] + LAUNCH_CLOCKS


def estimate(kernel: BuiltKernel, problem: AttentionProblem) -> float | None:
    """The cost of a compiled candidate; None if no block of it fits on an SM. Raises `NotInterpreted` or `LaunchError`.

    A family may have a model of its own, which asks the config instead of counting instructions.
    """
    cost = kernel.family.relative_cost(problem, kernel.config, kernel.gpu, kernel.compiled.info.registers)
    if cost is not None:
        return cost if math.isfinite(cost) else None
    return relative_cost(count_work(kernel, problem), kernel.gpu)
