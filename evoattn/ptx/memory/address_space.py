"""Where addresses lie, and the memories behind them that belong to threads and blocks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoattn.ptx.errors import MemoryFault
from evoattn.ptx.program.kernel import Instruction, Numbers
from evoattn.ptx.program.threads import ActiveThreads, Threads

GLOBAL_BASE = 1 << 32
SHARED_WINDOW, LOCAL_WINDOW, PARAMETER_WINDOW = 1 << 48, 2 << 48, 3 << 48
"""A generic address below the first window is global; windows are 2^48 bytes apart."""
WINDOW_SHIFT = np.uint64(48)
RESERVED_SMEM = 1024
"""Bytes at the start of a block's shared memory that are the system's, so that no address in it is an offset as well
(CUDA C++ Programming Guide, compute capabilities 8.x and 9.0: 1 KB per thread block)."""
RANK_SHIFT = 24
"""Of an address in the memory of a cluster: from this bit on the rank of the block plus one, or 0 for the own block."""


def as_elements(data: NDArray[Any], size: int) -> NDArray[Any]:
    """Bytes as elements of `size` bytes (1 to 16): what a gather or scatter moves in one piece."""
    return data.view(np.complex128 if size == 16 else f"u{size}")


class BankedMemory:
    """Memory of which every owner (a block, or a thread) has its own bytes, from address `first` to `limit` - 1."""

    def __init__(
        self, name: str, threads: Threads, owner_of: Numbers, owners: int, size: int, fill: int, first: int = 0
    ) -> None:
        """`size` bytes of each owner; `fill` is the 16-bit word that it holds before it is written."""
        self.name, self.threads, self.first, self.limit = name, threads, first, first + size
        self.fill = fill
        self.stride = max(-(-self.limit // 16) * 16, 16)
        self.data = np.full(self.stride * owners // 2, fill, np.uint16).view(np.uint8)
        self.base = owner_of.astype(np.int64) * self.stride
        self._offset_bases: dict[int, Numbers] = {}
        self._elements = {size: as_elements(self.data, size) for size in (1, 2, 4, 8, 16)}

    def elements(self, size: int) -> NDArray[Any]:
        """`data` as elements of `size` bytes."""
        return self._elements[size]

    def outside(self, place: int, size: int) -> str:
        """Of `size` bytes at an address outside: a part of a sentence."""
        return f"{size} bytes of {self.name} memory at byte {place - self.first}, outside its {self.limit - self.first}"

    def byte(self, index: int) -> int:
        """Which of its owner's bytes an index into `data` is, counted from the first."""
        return index % self.stride - self.first

    def before_first(self) -> Numbers:
        """The owners whose bytes before the first address were written."""
        before = self.data.reshape(-1, self.stride)[:, : self.first].view(np.uint16)
        return np.flatnonzero((before != self.fill).any(1))

    def locate(self, base: Numbers, offset: int, size: int, active: ActiveThreads, ins: Instruction) -> Numbers:
        """Index of the first byte in `data` (int64, one per active thread) of an access of `size` bytes at `base +
        offset`.

        `base` has one address an active thread, or is 0-d. Raises `MemoryFault` out of bounds or misaligned."""
        spread = (
            int(np.bitwise_or.reduce(base)) if base.ndim else int(base)
        )  # an upper bound that also shows every low bit
        over = spread + offset + size > self.limit and int(base.max()) + offset + size > self.limit
        if over or offset < 0 or (spread | offset) & (size - 1):
            self._check_exactly(base, offset, size, active, ins)
        start = self._offset_bases.get(offset)
        if start is None:
            start = self._offset_bases[offset] = self.base + offset
        place: Numbers = np.add(base, active.select(start), dtype=np.int64, casting="unsafe")
        return place

    def locate_in_cluster(
        self, base: Numbers, offset: int, size: int, active: ActiveThreads, ins: Instruction
    ) -> Numbers:
        """As `locate`, of addresses that may name another block of the cluster."""
        address = np.broadcast_to(base, (len(active),)).astype(np.int64)
        rank = address >> RANK_SHIFT
        if not rank.any():
            return self.locate(base, offset, size, active, ins)
        cluster = self.threads.cluster
        if int(rank.max()) > cluster:
            bad = int(np.flatnonzero(rank > cluster)[0])
            raise MemoryFault(
                f"{self.threads.describe(active.index[bad])} accesses the shared memory of rank {rank[bad] - 1} in a "
                f"cluster of {cluster} "
                f"blocks in {ins}."
            )
        inside = address & (1 << RANK_SHIFT) - 1
        self._check_exactly(inside, offset, size, active, ins)
        block = self.threads.block_of[active.index]
        target = np.where(rank == 0, block, block // cluster * cluster + rank - 1)
        place: Numbers = target * self.stride + inside + offset
        return place

    def _check_exactly(self, base: Numbers, offset: int, size: int, active: ActiveThreads, ins: Instruction) -> None:
        address = np.broadcast_to(base, (len(active),)).astype(np.int64) + offset
        outside = (address < self.first) | (address + size > self.limit)
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            raise MemoryFault(
                f"{self.threads.describe(active.index[at])} accesses {self.outside(int(address[at]), size)} bytes, in "
                f"{ins}."
            )
        misaligned = address & (size - 1) != 0
        if misaligned.any():
            at = int(np.flatnonzero(misaligned)[0])
            raise MemoryFault(
                f"{self.threads.describe(active.index[at])} accesses {size} bytes of {self.name} memory at byte "
                f"{address[at] - self.first}, which is misaligned, in {ins}."
            )
