"""Boxes that the tensor copy engine moves: where they lie in shared memory and in the tensor."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from evoattn.ptx.errors import AsyncFault, MemoryFault, unsupported
from evoattn.ptx.memory.address_space import PARAMETER_WINDOW
from evoattn.ptx.memory.tensor_map import BYTES, ELEMENT_BYTES, TiledMap, decode
from evoattn.ptx.program.arrays import Lanes, Numbers
from evoattn.ptx.program.dtypes import parse_type
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.operands import split_operands, vector_parts
from evoattn.ptx.program.threads import ActiveThreads
from evoattn.ptx.races.access import WRITE
from evoattn.ptx.races.global_accesses import bytes_of
from evoattn.ptx.state.context import Context

CHUNK, _ROW = 16, 128
"""Bytes: what swizzling moves in one piece, and the alignment of a box that is not swizzled (PTX ISA, tensor
swizzling)."""
_S32, _U64 = parse_type("s32"), parse_type("u64")


@lru_cache(maxsize=256)
def swizzled_chunks(count: int, swizzle_bytes: int) -> Lanes:
    """Where the 16-byte chunks of a box go, counted from its start.

    Bits 4 … of the byte address are XORed with bits 7 …: one bit for a swizzle of 32 bytes, two for 64, three for 128.
    """
    chunk = np.arange(count)
    return chunk if not swizzle_bytes else chunk ^ (chunk >> 3 & swizzle_bytes // CHUNK - 1)


class TensorMaps:
    """The tensor maps among a kernel's parameters, by where they lie."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._found: dict[int, tuple[TiledMap, Lanes | None]] = {}

    def at(self, address: int, ins: Instruction) -> tuple[TiledMap, Lanes | None]:
        """The map at a generic address or one of parameter space, and the tensor in memory, outermost dimension first;
        None of one that may reach outside of its buffer."""
        start = address - PARAMETER_WINDOW if address >= PARAMETER_WINDOW else address
        if start not in self._found:
            raw = self.context.parameters[start : start + BYTES].tobytes()
            found = decode(raw) if len(raw) == BYTES else None
            if found is None:
                raise AsyncFault(f"The address {address:#x} is of no tensor map among the parameters, in {ins}.")
            if found.swizzle_bytes and found.box[0] * ELEMENT_BYTES != found.swizzle_bytes:
                raise unsupported(ins, "a box narrower than its swizzle")
            self._found[start] = found, found.view(self.context.global_memory) if found.bounded else None
        return self._found[start]


def tensor_maps(context: Context) -> TensorMaps:
    return context.cached("tensor maps", lambda: TensorMaps(context))


@dataclass(frozen=True)
class Box:
    """One box to copy: where it is in shared memory, and the part of it that lies inside the tensor."""

    map: TiledMap
    chunks: Numbers
    granules: slice
    inside: tuple[slice, ...]
    """Of the box, outermost dimension first."""
    tensor_part: Lanes


class Boxes:
    """The operands of one instruction: `[map, {coordinates}]` and an address in shared memory."""

    def __init__(self, context: Context, ins: Instruction, map_operand: str, shared_operand: str, rank: int) -> None:
        self.context, self.ins, self.maps = context, ins, tensor_maps(context)
        map_address, coordinates = split_operands(map_operand.strip("[] "))
        self.map_address = context.source(map_address, _U64)
        self.coordinates = [context.source(c, _S32) for c in vector_parts(coordinates)]
        if len(self.coordinates) != rank:
            raise unsupported(ins, f"{len(self.coordinates)} coordinates")
        self.shared_address = context.address(shared_operand)

    def __call__(self, active: ActiveThreads) -> list[tuple[int, Box]]:
        """(thread, its box) of each active thread."""
        places = active.select(self.shared_address.base).astype(np.int64) + self.shared_address.offset
        columns = [active.select(c).tolist() for c in self.coordinates]
        maps = active.select(self.map_address).tolist()
        return [
            (thread, self._box(thread, self.maps.at(address, self.ins), place, where))
            for thread, address, place, *where in zip(active.index.tolist(), maps, places.tolist(), *columns)
        ]

    def _box(self, thread: int, found: tuple[TiledMap, Lanes | None], place: int, where: list[int]) -> Box:
        tiled, tensor = found
        shared = self.context.shared
        if len(where) != len(tiled.shape):
            raise AsyncFault(
                f"A tensor map of {len(tiled.shape)} dimensions is used with {len(where)} coordinates in {self.ins}."
            )
        alignment = 8 * tiled.swizzle_bytes or _ROW
        if place % alignment:
            raise AsyncFault(
                f"{self.context.threads.describe(thread)} has a box at byte {place - shared.first} of shared memory, "
                f"no multiple of {alignment} as a swizzle of {tiled.swizzle_bytes} bytes needs, in {self.ins}."
            )
        size = tiled.box_bytes
        if place < shared.first or place + size > shared.limit:
            raise MemoryFault(
                f"{self.context.threads.describe(thread)} has a box of {size} bytes at byte {place - shared.first} of "
                f"shared memory, outside its {shared.limit - shared.first} bytes, in {self.ins}."
            )
        start = int(shared.base[thread]) + place
        shift = 0 if self.context.races is None else self.context.races.shared.shift
        # Part of the box inside the tensor, a dimension at a time.
        lows = [min(max(-c, 0), side) for c, side in zip(where, tiled.box)]
        highs = [max(min(n - c, side), low) for c, n, side, low in zip(where, tiled.shape, tiled.box, lows)]
        inside = tuple(slice(low, high) for low, high in zip(lows, highs))[::-1]
        slices = tuple(slice(max(c + low, 0), max(c + high, 0)) for c, low, high in zip(where, lows, highs))[::-1]
        part = tiled.part(self.context.global_memory, slices) if tensor is None else tensor[slices]
        chunks = start // CHUNK + swizzled_chunks(size // CHUNK, tiled.swizzle_bytes)
        return Box(tiled, chunks, slice(start >> shift, start + size >> shift), inside, part)

    def count(self, box: Box, copied_bytes: int) -> None:
        """Tell the counters."""
        traffic = self.context.traffic
        if traffic is not None:
            traffic.tensor_copy(box.map.box_bytes, box.tensor_part.nbytes, copied_bytes)


def tell_global(context: Context, kind: str, box: Box, thread: int, ins: Instruction) -> None:
    """The race detector, of the part of a box that lies inside the tensor."""
    if context.races is None or not box.tensor_part.size:
        return
    index = bytes_of(box.tensor_part[(slice(1),) * box.tensor_part.ndim], context.global_memory)
    if kind == WRITE or context.races.grid.watches(int(index[0])):
        index = bytes_of(box.tensor_part, context.global_memory)
    context.races.grid.access(kind, index, ELEMENT_BYTES, np.full(len(index), thread), ins)
