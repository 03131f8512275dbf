"""A kernel on one device: its loaded module, and the arguments of its launches where a driver reads them."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from evoattn.backends import tensor_map
from evoattn.backends.driver_launch import PROGRAMMATIC_STREAM_SERIALIZATION, LaunchAttribute, LaunchConfig
from evoattn.backends.platform import Platform, error_of
from evoattn.families.base import starts_zeroed
from evoattn.families.block_list import BUFFERS
from evoattn.families.variants import SEQUENCES
from evoattn.model import backward, forward
from evoattn.model.launch import STATIC_SMEM_LIMIT, KernelLaunch, Scalar, TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import SCALES

if TYPE_CHECKING:  # only a check has one
    from evoattn.model.records import CompiledKernel

TENSORS = (*forward.MAIN, forward.LSE)
TERMS = (*forward.TERMS, *SCALES[1:])
"""The inputs of variants, after the scratch memory, in the order of `arguments.TERMS`."""
BACKWARD_TENSORS = (*backward.GIVEN, *backward.MADE, *(f"d{name}" for name in backward.TERM_GRADS))
"""What launches of the backward pass have beside these, after the others; gradients of tables come behind them."""
SCRATCH, ZEROED = len(TENSORS), len(TENSORS) + 1
"""Indices, after the tensors, of the two allocations that hold a call's scratch buffers."""
SCRATCH_ALIGNMENT = 256
SCALARS = {"int32": "i4x", "int64": "q", "float32": "f4x"}
"""Of `struct`: an argument in a slot."""
SLOT = 8
"""Bytes of an argument that is no tensor map: the widest is an address or an int64."""

Place = tuple[int, int]
"""Where a buffer lies: its index among the addresses of a call, and bytes behind that address."""


_Users = tuple[list[tuple[int, int]], list[tuple[int, int]]]
"""Of one address: the tensor maps (address in host memory, offset) and the slots (number, offset) that hold it."""


class LaunchArguments:
    """The arguments of one `KernelLaunch` in one block of host memory, as cuLaunchKernelEx reads them.

    `bind` writes addresses into it, `set_stream` the stream; the driver copies all of it when the launch is enqueued.
    Neither is safe without a lock where threads share the launch."""

    def __init__(self, launch: KernelLaunch, function: int, places: dict[str, Place], platform: Platform) -> None:
        """`places` has every buffer that the launch names."""
        self.kernel = launch.kernel
        self._platform = platform
        maps = len([argument for argument in launch.args if argument.__class__ is TensorMap])
        slots = len(launch.args) - maps
        self._memory = ctypes.create_string_buffer(maps * tensor_map.BYTES + slots * SLOT + tensor_map.ALIGNMENT)
        begin = -(-ctypes.addressof(self._memory) // tensor_map.ALIGNMENT) * tensor_map.ALIGNMENT
        next_map, first_slot = begin, begin + maps * tensor_map.BYTES
        self._maps: list[tuple[TensorMap, int, Place]] = []
        self._slots: list[tuple[int, Place]] = []
        self._users: dict[int, _Users] = {}
        self._sequences: int | None = None
        addresses, kinds = [], ["<"]
        values: list[int | float] = []
        for argument in launch.args:
            if isinstance(argument, TensorMap):
                self._maps.append((argument, next_map, places[argument.buffer]))
                addresses.append(next_map)
                next_map += tensor_map.BYTES
                continue
            addresses.append(first_slot + len(values) * SLOT)
            if argument.__class__ is Scalar:
                if argument.name == SEQUENCES:
                    self._sequences = len(values)
                kinds.append(SCALARS[argument.ctype])
                values.append(argument.value)
            else:
                self._slots.append((len(values), places[argument.name]))
                kinds.append("Q")
                values.append(0)
        struct.pack_into("".join(kinds), self._memory, first_slot - ctypes.addressof(self._memory), *values)
        self._slot_values = (ctypes.c_uint64 * slots).from_address(first_slot)
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value.programmatic_stream_serialization_allowed = 1
        self._config = LaunchConfig(
            *launch.grid, *launch.block, launch.smem_bytes, None, ctypes.pointer(self._attribute), int(launch.overlaps)
        )
        self.config = ctypes.c_void_p(ctypes.addressof(self._config))
        self.function = ctypes.c_void_p(function)
        self.arguments = ctypes.c_void_p(ctypes.addressof(self._pointers))
        self._sized = [one for one in self._maps if one[0].rows_at is not None]
        """Maps that say how many rows there are."""
        self._sizes: tuple[int, int] | None = None
        for _, memory, (index, offset) in (one for one in self._maps if one[0].rows_at is None):
            self._users.setdefault(index, ([], []))[0].append((memory, offset))
        for slot, (index, offset) in self._slots:
            self._users.setdefault(index, ([], []))[1].append((slot, offset))
        self._bound: tuple[int, ...] | None = None

    @property
    def addresses(self) -> int:
        """How many of a call's addresses, the first ones, hold all that it reads and writes."""
        return max(self._users) + 1

    def set_stream(self, stream: int) -> None:
        """The CUstream of the next launches."""
        self._config.stream = stream

    def bind(self, addresses: tuple[int, ...], sizes: tuple[int, int] | None = None) -> None:
        """The device addresses of the next launches, in the order that the places count, and how many packed sequences
        and rows of queries they have: at most as many as these were made for, and so many unless it is said. Raises
        `LaunchError`."""
        before, self._bound = self._bound, None
        platform, sized = self._platform, self._sized
        if before is None:
            self._sizes = None
            for tensor, memory, (index, offset) in self._maps:
                platform.encode_map(tensor, addresses[index] + offset, memory)
            for slot, (index, offset) in self._slots:
                self._slot_values[slot] = addresses[index] + offset
        else:
            for index, (maps, slots) in self._users.items():
                address = addresses[index]
                if before[index] != address:
                    for memory, offset in maps:
                        platform.move_map(memory, address + offset)
                    for slot, offset in slots:
                        self._slot_values[slot] = address + offset
            for _, memory, (index, offset) in sized if sizes == self._sizes else ():
                if before[index] != addresses[index]:
                    platform.move_map(memory, addresses[index] + offset)
        if sizes is not None and sizes != self._sizes:
            sequences, rows = sizes
            if self._sequences is not None:
                self._slot_values[self._sequences] = sequences
            for tensor, memory, (index, offset) in sized:
                platform.encode_map(tensor.with_rows(rows), addresses[index] + offset, memory)
            self._sizes = sizes
        self._bound = addresses


def own_tables(problem: AttentionProblem) -> tuple[str, ...]:
    """The buffers of the tables of the problem's own expressions, then of its block lists, then the scales of queries
    of 8 bits, in the order of calls."""
    tables = (table.buffer for table in problem.own_tables)
    return (*tables, *(BUFFERS if problem.blocks else ()), *(["q_scale"] if "q_scale" in problem.scale_shapes else []))


def tensor_places(problem: AttentionProblem, given: Sequence[int] | None = None) -> dict[str, Place]:
    """Where the tensors of a call lie among its addresses. `given`: of which terms there are addresses, of all unless
    it says so."""
    terms = (*TERMS, *own_tables(problem))
    names = (*TENSORS, "", "", *(terms if given is None else [terms[which] for which in given]))
    if problem.op == backward.BACKWARD.name:
        wanted = (table.buffer for table in problem.own_tables if table.buffer in backward.parse_grads(problem.grads))
        names = (*names, *BACKWARD_TENSORS, *(f"d{name}" for name in wanted))
    return {name: (i, 0) for i, name in enumerate(names) if name}


def operation_places(problem: AttentionProblem) -> dict[str, Place]:
    """The same of an operation beside attention, in the order of its specs, past those of scratch memory."""
    names = [spec.name for spec in (*problem.inputs, *problem.outputs)]
    return {name: (i if i < SCRATCH else i + 2, 0) for i, name in enumerate(names)}


def scratch_places(workspace: dict[str, int]) -> tuple[dict[str, Place], int, int]:
    """Where scratch buffers of these sizes lie, and the bytes of the two allocations: of anything, and of zeros."""
    places: dict[str, Place] = {}
    sizes = {SCRATCH: 0, ZEROED: 0}
    for name, size in workspace.items():
        index = ZEROED if starts_zeroed(name) else SCRATCH
        places[name] = index, sizes[index]
        sizes[index] += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    return places, sizes[SCRATCH], sizes[ZEROED]


class LoadedKernel:
    """One cubin in the context of one device. `failure` is empty, or the reason why it is not launched any more."""

    def __init__(self, cubin: bytes, platform: Platform, index: int) -> None:
        """Raises `LaunchError` where the driver refuses the module."""
        self.index, self.failure = index, ""
        self._platform = platform
        with platform.guard(index):
            platform.make_context_current(index)
            self._module = platform.load(cubin)
        self._functions: dict[str, int] = {}
        self._smem: dict[str, int] = {}

    def holds(self, launches: tuple[KernelLaunch, ...]) -> bool:
        """Whether the functions of `launches` are loaded, so that binding them loads nothing."""
        return all(
            one.kernel in self._functions and one.smem_bytes <= max(STATIC_SMEM_LIMIT, self._smem.get(one.kernel, 0))
            for one in launches
        )

    def _function(self, launch: KernelLaunch) -> int:
        if launch.kernel not in self._functions:
            self._functions[launch.kernel] = self._platform.function(self._module, launch.kernel)
        function = self._functions[launch.kernel]
        if launch.smem_bytes > max(STATIC_SMEM_LIMIT, self._smem.get(launch.kernel, 0)):
            self._platform.allow_shared_memory(function, launch.smem_bytes)
            self._smem[launch.kernel] = launch.smem_bytes
        return function

    def bound(self, launches: tuple[KernelLaunch, ...], places: dict[str, Place]) -> tuple[LaunchArguments, ...]:
        """The launches, ready to be bound. Raises `LaunchError`."""
        with self._platform.guard(self.index):
            self._platform.make_context_current(self.index)
            return tuple(LaunchArguments(one, self._function(one), places, self._platform) for one in launches)


class KernelBackend:
    """The `Backend` that a check runs a loaded kernel with: the launches of a call, then a wait. Buffers are parts of
    one piece of the CPU's memory, which goes to the device and back: torch's kernels for all else that a check does
    there take most of a second to load."""

    name, device = "op", torch.device("cpu")

    def __init__(self, kernel: LoadedKernel, platform: Platform) -> None:
        self._kernel, self._platform = kernel, platform

    def run(
        self, compiled: CompiledKernel, launches: tuple[KernelLaunch, ...], buffers: dict[str, torch.Tensor]
    ) -> tuple[str, ...]:
        """See `Backend.run`; `compiled` is what is loaded already. Raises `LaunchError` or `ContextLost`."""
        places = {name: (index, 0) for index, name in enumerate(buffers)}
        memory = next(iter(buffers.values())).untyped_storage()
        here = torch.empty(0, dtype=torch.uint8).set_(memory)
        with self._platform.guard(self._kernel.index):
            there = here.to(self._platform.device(self._kernel.index))
            moved = there.data_ptr() - here.data_ptr()
            addresses = tuple(buffer.data_ptr() + moved for buffer in buffers.values())
            stream = self._platform.stream(self._kernel.index)
            for packed in self._kernel.bound(launches, places):
                packed.bind(addresses)
                packed.set_stream(stream)
                if status := self._platform.launch(packed.config, packed.function, packed.arguments, None):
                    words = self._platform.describe(status)
                    raise error_of(status, f"The launch of {packed.kernel} failed: {words}.")
            self._platform.synchronize(self._kernel.index)
            here.copy_(there)
        return ()
