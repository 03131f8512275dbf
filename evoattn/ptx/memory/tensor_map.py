"""The interpreter's stand-in for a CUtensorMap: the 128 bytes that a kernel gets by value."""

import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evoattn.ptx.errors import ImpossibleLaunch, MemoryFault
from evoattn.ptx.memory.address_space import GLOBAL_BASE
from evoattn.ptx.memory.global_buffers import GlobalMemory

BYTES = 128
ELEMENT_BYTES = 2
MAX_RANK = 5
MAX_BOX_SIDE = 256
MAX_STRIDE_BYTES = 1 << 40
_LOW = (1 << 32) - 1
_MAGIC = 0x70614D2D78747074
_FORMAT = struct.Struct("<QQIHH5Q4Q5I")


@dataclass(frozen=True)
class TiledMap:
    """Boxes of a tensor of 16-bit elements in global memory. All tuples count from the innermost dimension."""

    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    """Of every dimension but the innermost."""
    box: tuple[int, ...]
    swizzle_bytes: int
    bounded: bool = True
    """Whether the whole tensor lies in its buffer; else each box is looked at, and addresses wrap at 2^64."""

    @property
    def box_bytes(self) -> int:
        return math.prod(self.box) * ELEMENT_BYTES

    def encode(self) -> bytes:
        """Raises `ImpossibleLaunch` for what cuTensorMapEncodeTiled refuses (CUDA driver API, tensor map object
        management)."""
        rank = len(self.shape)
        why = self._why_refused()
        if why:
            raise ImpossibleLaunch(f"The driver would refuse a tensor map {self}: {why}.")
        pad = (0,) * (MAX_RANK - rank)
        numbers = (*self.shape, *pad, *self.strides_bytes, *pad, *self.box, *pad)
        return _FORMAT.pack(_MAGIC, self.address, rank, self.swizzle_bytes, self.bounded, *numbers).ljust(BYTES, b"\0")

    def _why_refused(self) -> str:
        rank, inner = len(self.shape), self.box[0] * ELEMENT_BYTES
        if not 1 <= rank <= MAX_RANK or len(self.box) != rank or len(self.strides_bytes) != rank - 1:
            return "its rank"
        if self.address % 16 or any(s % 16 or not 0 <= s < MAX_STRIDE_BYTES for s in self.strides_bytes):
            return "the address and every stride must be multiples of 16 bytes"
        if not all(1 <= side <= MAX_BOX_SIDE for side in self.box) or not all(1 <= n <= 1 << 32 for n in self.shape):
            return f"a side of a box has 1 to {MAX_BOX_SIDE} elements, one of the tensor 1 to 2^32"
        if (
            self.swizzle_bytes not in (0, 32, 64, 128)
            or inner % 16
            or (self.swizzle_bytes and inner > self.swizzle_bytes)
        ):
            return "the inner side of a box is a multiple of 16 bytes and no longer than the swizzle"
        return ""

    def view(self, memory: GlobalMemory) -> NDArray[np.uint16]:
        """The tensor as it lies in memory, uint16, outermost dimension first. Raises `MemoryFault` if it reaches
        outside its buffer."""
        return self.part(memory, tuple(slice(0, n) for n in self.shape[::-1]))

    def part(self, memory: GlobalMemory, slices: tuple[slice, ...]) -> NDArray[np.uint16]:
        """Those elements of it, outermost dimension first; `slices` lie within the shape. Raises as `view` does."""
        # Of a buffer that is spread (`GlobalMemory.spread`) the low halves say where things are in its array.
        strides = (ELEMENT_BYTES, *(stride & _LOW for stride in self.strides_bytes))[::-1]
        shape = tuple(part.stop - part.start for part in slices)
        if not all(shape):
            return np.empty(shape, np.uint16)
        start = self.address - GLOBAL_BASE
        if self.bounded:
            start += sum(part.start * stride for part, stride in zip(slices, strides, strict=True))
        else:
            start += sum(
                part.start * stride for part, stride in zip(slices[::-1], (ELEMENT_BYTES, *self.strides_bytes))
            )
            start = memory.index_of(start % (1 << 64))
        size = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + ELEMENT_BYTES
        place = memory.place_outside(start, size)
        if place:
            raise MemoryFault(f"A tensor map reaches {place}: {self}.")
        return np.ndarray(shape, np.uint16, memory.data, start, strides)


def decode(raw: bytes) -> TiledMap | None:
    """The map that was encoded into these bytes; None if none was."""
    magic, address, rank, swizzle, bounded, *rest = _FORMAT.unpack(raw[: _FORMAT.size])
    if magic != _MAGIC:
        return None
    sizes = tuple(rest[:rank]), tuple(rest[5 : 4 + rank]), tuple(rest[9 : 9 + rank])
    return TiledMap(address, *sizes, swizzle, bool(bounded))
