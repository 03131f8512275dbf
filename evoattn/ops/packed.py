"""A launch with its arguments in host memory, ready to be enqueued with other addresses and on other streams."""

from __future__ import annotations

import ctypes
import struct

from evoattn.backends import tensor_map
from evoattn.backends.driver_launch import PROGRAMMATIC_STREAM_SERIALIZATION, LaunchAttribute, LaunchConfig
from evoattn.model.launch import KernelLaunch, Scalar, TensorMap
from evoattn.ops.platform import Platform

SCALARS = {"int32": "i4x", "int64": "q", "float32": "f4x"}
"""Of `struct`: an argument in a slot."""
SLOT = 8
"""Bytes of an argument that is no tensor map: the widest is an address or an int64."""

Place = tuple[int, int]
"""Where a buffer lies: its index among the addresses of a call, and bytes behind that address."""


_Users = tuple[list[tuple[int, int]], list[tuple[int, int]]]
"""Of one address: the tensor maps (address in host memory, offset) and the slots (number, offset) that hold it."""


class PackedLaunch:
    """The arguments of one `KernelLaunch` in one block of host memory, as cuLaunchKernelEx reads them.

    `bind` writes addresses into it, `set_stream` the stream; the driver copies all of it when the launch is enqueued.
    Neither is safe without a lock where threads share the launch.
    """

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
                kinds.append(SCALARS[argument.ctype])
                values.append(argument.value)
            else:
                self._slots.append((len(values), places[argument.name]))
                kinds.append("Q")
                values.append(0)
        struct.pack_into("".join(kinds), self._memory, first_slot - ctypes.addressof(self._memory), *values)
        self._words = (ctypes.c_uint64 * slots).from_address(first_slot)
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        self._attribute = LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value.programmatic_stream_serialization_allowed = 1
        self._config = LaunchConfig(
            *launch.grid, *launch.block, launch.smem_bytes, None, ctypes.pointer(self._attribute), int(launch.overlaps)
        )
        self.config = ctypes.c_void_p(ctypes.addressof(self._config))
        self.function = ctypes.c_void_p(function)
        self.arguments = ctypes.c_void_p(ctypes.addressof(self._pointers))
        for _, memory, (index, offset) in self._maps:
            self._users.setdefault(index, ([], []))[0].append((memory, offset))
        for slot, (index, offset) in self._slots:
            self._users.setdefault(index, ([], []))[1].append((slot, offset))
        self._bound: tuple[int, ...] | None = None

    def set_stream(self, stream: int) -> None:
        """The CUstream of the next launches."""
        self._config.stream = stream

    def bind(self, addresses: tuple[int, ...]) -> None:
        """The device addresses of the next launches, in the order that the places count. Raises `LaunchError`."""
        before, self._bound = self._bound, None
        if before is None:
            for tensor, memory, (index, offset) in self._maps:
                self._platform.encode_map(tensor, addresses[index] + offset, memory)
            for slot, (index, offset) in self._slots:
                self._words[slot] = addresses[index] + offset
        else:
            for index, (maps, slots) in self._users.items():
                address = addresses[index]
                if before[index] != address:
                    for memory, offset in maps:
                        self._platform.move_map(memory, address + offset)
                    for slot, offset in slots:
                        self._words[slot] = address + offset
        self._bound = addresses
