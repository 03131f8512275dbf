"""Whether the blocks that BLOCKS_PER_SM asks for fit on one SM together: sentences for the `why_invalid` of several
families.

`blocks` is BLOCKS_PER_SM, 1 where a family has no such parameter; `warps` are those of a block."""

import math
from collections.abc import Mapping
from functools import lru_cache

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem

WARP = 32
GIB = 1 << 30
USABLE_MEMORY = 0.9
"""Of a card's memory: the context and other programs have the rest."""
MAX_REGISTERS = 255
"""Per thread (CUDA C++ Programming Guide, technical specifications)."""


def register_cap(warps: int, blocks: int) -> int:
    """Registers per thread that the launch bounds leave: warps are dealt to four files of 512 per lane, in steps of 8
    (reports/sources.md)."""
    return min(MAX_REGISTERS, 512 // math.ceil(warps * blocks / 4) // 8 * 8)


def why_not_resident(gpu: GpuSpec, blocks: int, warps: int, smem_bytes: int) -> str | None:
    """Dynamic shared memory of `smem_bytes` per block, or threads, beyond what an SM has."""
    threads = WARP * warps
    if blocks * (smem_bytes + gpu.smem_reserved_per_block) > gpu.smem_per_sm:
        what = f"blocks of {smem_bytes} bytes of shared memory, plus 1 KB each"
        return f"BLOCKS_PER_SM={blocks} {what}, are over the {gpu.smem_per_sm} of an SM."
    if blocks * threads > gpu.threads_per_sm:
        return (
            f"BLOCKS_PER_SM={blocks} blocks of {threads} threads are over the {gpu.threads_per_sm} of a {gpu.name} SM."
        )
    return None


def why_same_code(blocks: int, warps: int) -> str | None:
    """One block fewer gives the same register cap, hence the same code."""
    cap = register_cap(warps, blocks)
    if blocks > 1 and cap == register_cap(warps, blocks - 1):
        return f"BLOCKS_PER_SM={blocks} leaves a thread {cap} registers, as {blocks - 1} does: the same code."
    return None


def why_too_few_registers(blocks: int, warps: int, needed: int) -> str | None:
    """Fewer registers than the `needed` of a thread: the kernel would spill."""
    cap = register_cap(warps, blocks)
    if needed > cap:
        return (
            f"A thread needs about {needed} registers, and {WARP * warps} threads in {blocks} blocks per SM leave it "
            f"{cap}."
        )
    return None


def why_no_memory(problem: AttentionProblem, scratch: Mapping[str, int], gpu: GpuSpec) -> str | None:
    """Scratch buffers of these bytes that the card has no memory for beside the problem's own tensors."""
    wanted, left = sum(scratch.values()), _memory_left(problem, gpu)
    if wanted > left:
        return (
            f"The scratch buffers would take {wanted / GIB:.1f} GiB, and beside the problem's tensors a {gpu.name} has "
            f"{max(0, left) / GIB:.1f}."
        )
    return None


@lru_cache(maxsize=256)  # the same for all configs of a problem
def _memory_left(problem: AttentionProblem, gpu: GpuSpec) -> int:
    """Bytes beside the problem's own tensors."""
    shapes = [*(problem.shape(tensor) for tensor in (*problem.tensors, "o")), problem.term_shapes.get("bias", (0,))]
    # All keys, even where few are in use or seen: `problem.bytes` counts only those that are read.
    return int(USABLE_MEMORY * gpu.dram_bytes) - problem.element_bytes * sum(math.prod(shape) for shape in shapes)
