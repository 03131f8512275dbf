"""Global memory: named buffers in one arena, with gaps between them in which every access is a fault."""

from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoattn.ptx.errors import MemoryFault
from evoattn.ptx.memory.address_space import GLOBAL_BASE, as_elements
from evoattn.ptx.program.kernel import Instruction, Numbers, Octets
from evoattn.ptx.program.threads import ActiveThreads

ALIGNMENT = 256
"""Bytes: what cudaMalloc guarantees."""
_LOW = (1 << 32) - 1
GUARD = 1 << 16
"""Bytes between buffers: more than a tile of a kernel that runs over the end of its buffer."""


class GlobalMemory:
    """Buffers that a kernel sees at addresses. They are copied into an arena for a run, and back after it."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._arrays: list[Octets] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.data = np.zeros(0, np.uint8)
        self._elements: dict[int, NDArray[Any]] = {}
        self._far: dict[int, NDArray[np.uint16]] = {}
        self._high: NDArray[np.int64] | None = None
        """By 16 bytes of the arena: the high half of their addresses, where some buffer is spread."""

    def elements(self, size: int) -> NDArray[Any]:
        """The arena as elements of `size` bytes."""
        return self._elements[size]

    def map(self, name: str, array: Octets) -> int:
        """Add a buffer, a one-dimensional uint8 array; returns its address. What a run writes is in `array` after
        it."""
        if array.dtype != np.uint8 or array.ndim != 1:
            raise ValueError("a buffer is a one-dimensional uint8 array")
        start = -(-(self._ends[-1] + GUARD if self._ends else GUARD) // ALIGNMENT) * ALIGNMENT
        self._names.append(name)
        self._arrays.append(array)
        self._starts.append(start)
        self._ends.append(start + len(array))
        return GLOBAL_BASE + start

    def spread(self, name: str, far: NDArray[np.uint16]) -> None:
        """Each 16 bytes of a buffer lie `far` · 2^32 bytes further on than in its array: the space between takes no
        memory, and an address that was computed in 32 bits is a fault."""
        self._far[self._names.index(name)] = far

    def load(self) -> None:
        """Copy the buffers into the arena."""
        size = -(-(self._ends[-1] if self._ends else 0) // 16) * 16 + 16
        if len(self.data) != size:
            self.data = np.zeros(size, np.uint8)
            self._elements = {width: as_elements(self.data, width) for width in (1, 2, 4, 8, 16)}
            if self._far:
                self._high = np.zeros(size // 16 + 1, np.int64)
                for buffer, far in self._far.items():
                    first = self._starts[buffer] // 16
                    self._high[first : first + len(far)] = far
        for array, start, end in zip(self._arrays, self._starts, self._ends):
            self.data[start:end] = array

    def store(self) -> None:
        """Copy the arena back into the buffers."""
        for array, start, end in zip(self._arrays, self._starts, self._ends):
            np.copyto(array, self.data[start:end])

    def locate(self, base: Numbers, offset: int, size: int, active: ActiveThreads, ins: Instruction) -> Numbers:
        """Index of the first byte in the arena (int64, one per active thread); see `BankedMemory.locate`."""
        index = np.add(base, offset - GLOBAL_BASE, dtype=np.int64, casting="unsafe")
        if index.ndim == 0:
            index = np.full(len(active), index)
        if self._high is not None:
            index = self._folded(self._high, index, active, ins)
        lowest, highest = int(np.minimum.reduce(index)), int(np.maximum.reduce(index))
        at = bisect_right(self._starts, lowest) - 1
        if at < 0 or highest + size > self._ends[at]:
            self.check_range(index, size, active, ins)
        if size > 1 and int(np.bitwise_or.reduce(index)) & (size - 1):
            bad = int(np.flatnonzero(index & (size - 1))[0])
            raise MemoryFault(
                f"{active.threads.describe(active.index[bad])} accesses {size} bytes of global memory at an address "
                "that is no multiple "
                f"of {size}, {self._place(int(index[bad]))}, in {ins}."
            )
        return index

    def _folded(self, high: NDArray[np.int64], index: Numbers, active: ActiveThreads, ins: Instruction) -> Numbers:
        """Where in the arena spread buffers are accessed. Raises `MemoryFault` between what is there."""
        low = index & _LOW
        wrong = index >> 32 != high[np.minimum(low >> 4, len(high) - 1)]
        if wrong.any():
            bad = int(np.flatnonzero(wrong)[0])
            raise MemoryFault(
                f"{active.threads.describe(active.index[bad])} accesses global memory "
                f"{self._place(int(low[bad]))}, but {int(index[bad]) >> 32} times 2^32 bytes away from it: an address "
                f"of more than 32 bits has lost or gained some, in {ins}."
            )
        return low

    def check_range(self, index: Numbers, size: int, active: ActiveThreads, ins: Instruction) -> None:
        """Raise `MemoryFault` for the first access of `size` bytes at arena `index` that is not whole inside one
        buffer."""
        if not self._starts:
            outside = np.ones(len(index), np.bool_)
        else:
            at = np.searchsorted(self._starts, index, side="right") - 1
            outside = (at < 0) | (index + size > np.asarray(self._ends)[np.maximum(at, 0)])
        if outside.any():
            bad = int(np.flatnonzero(outside)[0])
            raise MemoryFault(
                f"{active.threads.describe(active.index[bad])} accesses {size} bytes of global memory "
                f"{self._place(int(index[bad]))}, "
                f"in {ins}."
            )

    def buffer_at(self, index: int) -> int:
        """The number of the buffer that a byte of the arena is in."""
        return bisect_right(self._starts, index) - 1

    def buffers_at(self, index: Numbers) -> Numbers:
        """As `buffer_at`, of each of these bytes."""
        return np.searchsorted(self._starts, index, side="right") - 1

    def name_of(self, buffer: int) -> str:
        return self._names[buffer]

    def numbers_of(self, names: frozenset[str]) -> frozenset[int]:
        return frozenset(i for i, name in enumerate(self._names) if name in names)

    def describe(self, index: int) -> str:
        """A byte of the arena in words."""
        return self._place(index)

    def index_of(self, distance: int) -> int:
        """The arena index of an address `distance` bytes behind the first: its low half in a buffer that is spread. An
        address between what is there is left as it is, which is outside of every buffer."""
        if self._high is None:
            return distance
        low = distance & _LOW
        return low if distance >> 32 == self._high[min(low >> 4, len(self._high) - 1)] else distance

    def place_outside(self, start: int, size: int) -> str:
        """Where bytes from arena index `start` on end outside the buffer that they begin in, in words; an empty string
        if they do not."""
        at = bisect_right(self._starts, start) - 1
        if at >= 0 and start + size <= self._ends[at]:
            return ""
        return self._place(start + size - 1 if at >= 0 and start < self._ends[at] else start)

    def _place(self, index: int) -> str:
        """An arena index in words, by the nearest buffer."""
        if not self._starts:
            return "where no buffer is mapped"
        at = min(range(len(self._starts)), key=lambda i: max(self._starts[i] - index, index - self._ends[i] + 1, 0))
        name, start, size = self._names[at], self._starts[at], self._ends[at] - self._starts[at]
        if max(start - index, index - start - size) > (1 << 40):
            return f"at {index + GLOBAL_BASE:#x}, far from every buffer"
        return f'at byte {index - start} of buffer "{name}", which has {size} bytes'
