"""A kernel on one device: its loaded module, and the arguments of its launches where a driver reads them."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from evoattn.backends import tensor_map
from evoattn.backends.base import LaunchError
from evoattn.backends.driver_launch import PROGRAMMATIC_STREAM_SERIALIZATION, LaunchAttribute, LaunchConfig
from evoattn.backends.platform import Platform, error_of
from evoattn.families.base import starts_zeroed
from evoattn.families.block_list import BUFFERS
from evoattn.families.variants import SEQUENCES
from evoattn.model import backward, forward
from evoattn.model.launch import STATIC_SMEM_LIMIT, Buffer, KernelLaunch, Scalar, TensorMap
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
SCALARS = {"int32": struct.Struct("<i"), "int64": struct.Struct("<q"), "float32": struct.Struct("<f")}
SLOT = 8
"""Bytes of an argument that is no tensor map: the widest is an address or an int64."""
MAP_SLOTS = tensor_map.BYTES // SLOT
ELSEWHERE = 1 << 20
"""Bytes to another address, whose memory is not touched."""

Place = tuple[int, int]
"""Where a buffer lies: its index among the addresses of a call, and bytes behind that address."""


class Binding:
    """The arguments of launches that follow one another, in one block of host memory of slots of 8 bytes: tensor maps,
    addresses, of which launches share those of the same buffer, and numbers.

    `bind` writes addresses there, and the driver copies what a launch reads when it is enqueued: not safe without a
    lock where threads share the launches."""

    def __init__(self, launches: Sequence[KernelLaunch], places: dict[str, Place], platform: Platform) -> None:
        """`places` has every buffer that a launch names."""
        self._platform = platform
        every = [argument for launch in launches for argument in launch.args]
        maps = [one for one in every if isinstance(one, TensorMap)]
        buffers = list(dict.fromkeys(one for one in every if isinstance(one, Buffer)))
        numbers = [one for one in every if isinstance(one, Scalar)]
        slots = len(maps) * MAP_SLOTS + len(buffers) + len(numbers)
        memory = (ctypes.c_uint64 * (slots + tensor_map.ALIGNMENT // SLOT))()
        skipped = -ctypes.addressof(memory) % tensor_map.ALIGNMENT // SLOT
        self._begin = ctypes.addressof(memory) + skipped * SLOT
        self._slots = memoryview(memory).cast("B").cast("Q")[skipped:]
        self._maps = [(one, i * MAP_SLOTS, places[one.buffer]) for i, one in enumerate(maps)]
        first = len(maps) * MAP_SLOTS
        self._buffers = [(first + i, *places[one.name]) for i, one in enumerate(buffers)]
        """Slots that hold an address: the slot, the address's index among a call's, bytes behind it."""
        first += len(buffers)
        for i, one in enumerate(numbers, first):
            SCALARS[one.ctype].pack_into(memory, (skipped + i) * SLOT, one.value)
        self._sequences = [i for i, one in enumerate(numbers, first) if one.name == SEQUENCES]
        of_kind = {TensorMap: iter(range(0, first, MAP_SLOTS)), Scalar: iter(range(first, slots))}
        of_buffer = {one: slot for one, (slot, *_) in zip(buffers, self._buffers, strict=True)}
        self.arguments = [
            [
                self._begin + SLOT * (of_buffer[one] if isinstance(one, Buffer) else next(of_kind[one.__class__]))
                for one in launch.args
            ]
            for launch in launches
        ]
        """Where in host memory those of each launch are."""
        used = [*(index for _, index, _ in self._buffers), *(index for *_, (index, _) in self._maps)]
        self.addresses = 1 + max(used, default=-1)
        """How many of a call's addresses, the first ones, hold all that the launches read and write."""
        self._sized = [one for one in self._maps if one[0].rows_at is not None]
        """Maps that say how many rows there are."""
        self._words, self._moved = list(self._buffers), list[tuple[int, int, int]]()
        """With the maps whose address is their first word; the other maps, which the driver moves."""
        self._sizes: tuple[int, int] | None = None
        self._bound: tuple[int, ...] | None = None

    def bind(self, addresses: tuple[int, ...], sizes: tuple[int, int] | None = None) -> None:
        """The device addresses of the next launches, in the order that the places count, and how many packed sequences
        and rows of queries they have: at most as many as these were made for, and so many unless it is said. Raises
        `LaunchError`."""
        before, self._bound = self._bound, None
        slots = self._slots
        if before is None:
            self._encode(addresses)
        for slot, index, offset in self._words:
            slots[slot] = addresses[index] + offset
        for slot, index, offset in self._moved:
            if before is None or before[index] != addresses[index]:
                self._platform.move_map(self._begin + slot * SLOT, addresses[index] + offset)
        if sizes is not None and sizes != self._sizes:
            sequences, rows = sizes
            for slot in self._sequences:
                slots[slot] = sequences
            for one, slot, (index, offset) in self._sized:
                self._platform.encode_map(one.with_rows(rows), addresses[index] + offset, self._begin + slot * SLOT)
            self._sizes = sizes
        self._bound = addresses

    def _encode(self, addresses: tuple[int, ...]) -> None:
        """Make the tensor maps, and learn which have their address in the first word and nowhere else, as the driver
        shows that moves one: it takes several times as long as a write. Raises `LaunchError`."""
        self._sizes, self._words, self._moved = None, list(self._buffers), []
        for one, slot, (index, offset) in self._maps:
            at, address = self._begin + slot * SLOT, addresses[index] + offset
            self._platform.encode_map(one, address, at)
            made, moved = self._slots[slot : slot + MAP_SLOTS].tolist(), []
            with contextlib.suppress(LaunchError):
                self._platform.move_map(at, address + ELSEWHERE)
                moved = self._slots[slot : slot + MAP_SLOTS].tolist()
            plain = made[0] == address and moved == [address + ELSEWHERE, *made[1:]]
            (self._words if plain else self._moved).append((slot, index, offset))


class LaunchArguments:
    """One `KernelLaunch` as cuLaunchKernelEx takes it. `binding` has its arguments, and those of others beside it."""

    def __init__(self, launch: KernelLaunch, function: int, arguments: Sequence[int], binding: Binding) -> None:
        """`arguments`: where in host memory they are."""
        self.kernel, self.binding = launch.kernel, binding
        self._pointers = (ctypes.c_void_p * len(arguments))(*arguments)
        self._attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value.programmatic_stream_serialization_allowed = 1
        self._config = LaunchConfig(
            *launch.grid, *launch.block, launch.smem_bytes, None, ctypes.pointer(self._attribute), int(launch.overlaps)
        )
        self.config = ctypes.c_void_p(ctypes.addressof(self._config))
        self.function = ctypes.c_void_p(function)
        self.arguments = ctypes.c_void_p(ctypes.addressof(self._pointers))

    def set_stream(self, stream: int) -> None:
        """The CUstream of the next launches."""
        self._config.stream = stream


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
        binding = Binding(launches, places, self._platform)
        with self._platform.guard(self.index):
            self._platform.make_context_current(self.index)
            return tuple(
                LaunchArguments(one, self._function(one), arguments, binding)
                for one, arguments in zip(launches, binding.arguments, strict=True)
            )


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
                packed.binding.bind(addresses)
                packed.set_stream(stream)
                if status := self._platform.launch(packed.config, packed.function, packed.arguments, None):
                    words = self._platform.describe(status)
                    raise error_of(status, f"The launch of {packed.kernel} failed: {words}.")
            self._platform.synchronize(self._kernel.index)
            here.copy_(there)
        return ()
