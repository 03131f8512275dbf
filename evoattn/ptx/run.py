"""One launch of one kernel over NumPy arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoattn.ptx.errors import ImpossibleLaunch
from evoattn.ptx.machine.launch import Execution, Machine, Shape
from evoattn.ptx.memory.global_buffers import GlobalMemory
from evoattn.ptx.memory.tensor_map import TiledMap
from evoattn.ptx.program.kernel import Octets, Program
from evoattn.ptx.program.parser import parse_program
from evoattn.ptx.races.grid_dependency import Touched
from evoattn.ptx.state.context import DEFAULT_STEP_LIMIT, POISON, RunOptions

Extent = int | tuple[int, ...]
"""Blocks or threads along x, or along x, y and z; what is left out is 1."""


@dataclass(frozen=True)
class TensorMap:
    """A kernel argument that is a CUtensorMap by value (sm_90): boxes of 16-bit elements of the buffer called `buffer`.

    `shape` and `box` in elements and `strides_bytes` (of every dimension but the innermost, which is contiguous) count
    from the innermost dimension; at most five of them. `swizzle_bytes` is 0, 32, 64 or 128. With `wraps` the tensor may
    reach outside of the buffer, and addresses wrap at 2^64 bytes; the part of a box within `shape` may not."""

    buffer: str
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 0
    wraps: bool = False


Argument = str | np.generic | bytes | TensorMap
"""The address of the buffer of that name; by value a number, a struct as its bytes, or a tensor map."""


def run_launch(  # noqa: PLR0913 — the face of the library
    program: str | Program,
    kernel: str,
    grid: Extent,
    block: Extent,
    args: Sequence[Argument] = (),
    buffers: Mapping[str, NDArray[Any]] | None = None,
    *,
    smem_bytes: int = 0,
    cluster: Extent = 1,
    together: int = 1,
    after: Touched | None = None,
    far: Mapping[str, NDArray[np.uint16]] | None = None,
    detect_races: bool = True,
    count: bool = True,
    step_limit: int = DEFAULT_STEP_LIMIT,
    poison: int = POISON,
    late_blocks: bool = False,
) -> Execution:
    """Run one launch of the kernel called `kernel` and return its faults and counters.

    `program` is PTX text, or what `parse_program` made of it. `buffers` are global memory: C-contiguous arrays of any
    dtype, changed in place, each with its own bounds. `args` has one entry for each kernel parameter. `smem_bytes` is
    dynamic shared memory; `cluster` is in blocks and goes along x alone. `together` neighbouring blocks (in the order
    of their numbers) run at once, as they wait for one another.

    `detect_races` switches the race detectors, `count` the counters, each of which takes time. `step_limit` bounds the
    instructions of one batch of blocks: a kernel that exceeds it is taken never to end. `poison` is the 16-bit word
    that shared memory holds until it is written, and a copy's destination until the copy has landed: a NaN in every
    float type. `after` is given for a launch that may begin before earlier ones have ended (programmatic dependent
    launch): what those touched, from their `Execution.touched`. `far` spreads buffers over addresses, by name: each 16
    bytes lie so many times 2^32 bytes further on than in the array (`[bytes / 16]`). With `late_blocks` every third
    of the first blocks of a kernel with atomics begins when those beside it have ended, or have waited for long, and
    what every third block asks the copy engine to add comes as late as its wait for it allows.

    What goes wrong while the kernel runs is in `Execution.faults`, one sentence each. Raises `ImpossibleLaunch` for a
    launch that no device accepts, `UnsupportedInstruction` where the kernel has an instruction that is not modelled,
    `ValueError` for buffers that are not C-contiguous or overlap."""
    kernels = (parse_program(program) if isinstance(program, str) else program).kernels
    if kernel not in kernels:
        raise ImpossibleLaunch(f"The program has no kernel {kernel}; it has {', '.join(kernels) or 'none'}.")
    memory = GlobalMemory()
    addresses = {name: memory.map(name, flat) for name, flat in _flattened(buffers or {}).items()}
    for name, places in (far or {}).items():
        memory.spread(name, places)
    machine = Machine(
        kernels[kernel],
        memory,
        [_value(argument, addresses) for argument in args],
        Shape(_three(grid), _three(block), smem_bytes, _three(cluster), together),
        RunOptions(detect_races, count, step_limit, poison, late_blocks),
        after,
    )
    return machine.run()


def _three(extent: Extent) -> tuple[int, int, int]:
    given = (extent,) if isinstance(extent, int) else extent
    if not 1 <= len(given) <= 3:
        raise ImpossibleLaunch(f"An extent has one to three numbers, not {extent}.")
    x, y, z = (*given, 1, 1)[:3]
    return x, y, z


def _flattened(buffers: Mapping[str, NDArray[Any]]) -> dict[str, Octets]:
    """Each buffer as a one-dimensional view of its bytes."""
    flat: dict[str, Octets] = {}
    spans: list[tuple[int, int, str]] = []
    for name, array in buffers.items():
        if not array.flags.c_contiguous:
            raise ValueError(f"The buffer {name} is not C-contiguous.")
        flat[name] = array.reshape(-1).view(np.uint8)
        start = array.__array_interface__["data"][0]
        spans.append((start, start + array.nbytes, name))
    spans = sorted(span for span in spans if span[0] < span[1])
    for (_, end, one), (start, _, other) in pairwise(spans):
        if start < end:
            raise ValueError(f"The buffers {one} and {other} overlap.")
    return flat


def _value(argument: Argument, addresses: Mapping[str, int]) -> np.generic | bytes:
    """An argument as the bytes that the kernel gets."""
    if isinstance(argument, np.generic | bytes):
        return argument
    name = argument.buffer if isinstance(argument, TensorMap) else argument
    if name not in addresses:
        raise ImpossibleLaunch(f"The launch names a buffer {name} that was not given.")
    if isinstance(argument, TensorMap):
        numbers = argument.shape, argument.strides_bytes, argument.box, argument.swizzle_bytes
        return TiledMap(addresses[name], *numbers, bounded=not argument.wraps).encode()
    return np.uint64(addresses[name])
