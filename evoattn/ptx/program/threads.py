"""The threads that run together: their coordinates, and which of them are active."""

from __future__ import annotations

from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from evoattn.ptx.program.kernel import Mask, Numbers

WARP = 32
_T = TypeVar("_T", bound=np.generic)


class Threads:
    """Coordinates of all threads of some blocks of a grid; each array has one element per thread ("lane of the
    machine").

    A block whose size is no multiple of 32 is padded to whole warps by threads that have exited before the start."""

    def __init__(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        first_block: int,
        block_count: int,
        cluster: int = 1,
    ) -> None:
        """`cluster` blocks in a row of the grid make a cluster; both numbers of blocks are multiples of it."""
        self.grid, self.block, self.cluster = grid, block, cluster
        self.real_threads = block[0] * block[1] * block[2]
        self.block_threads = -(-self.real_threads // WARP) * WARP
        self.block_count, self.first_block = block_count, first_block
        self.block_warps = self.block_threads // WARP
        self.cluster_warps = self.block_warps * cluster
        self.count = self.block_threads * block_count
        self.warp_count = self.count // WARP
        index = np.arange(self.count)
        self.in_block = index % self.block_threads
        self.block_of = index // self.block_threads
        self.lane = index % WARP
        self.warp_of = index // WARP
        self.exists = self.in_block < self.real_threads

    def special_register(self, name: str) -> Numbers | None:
        """The uint32 values of `%tid.x` and its like; None for a name that is none of them."""
        base, _, axis = name.partition(".")
        position = "xyz".find(axis) if axis else -1
        values: Numbers | int | None = None
        if base in ("%ntid", "%nctaid") and position >= 0:
            values = (self.block if base == "%ntid" else self.grid)[position]
        elif base in ("%cluster_nctaid", "%nclusterid") and position >= 0:
            ratio = (self.cluster, 1, 1)[position]
            values = ratio if base == "%cluster_nctaid" else self.grid[position] // ratio
        elif base in ("%tid", "%ctaid") and position >= 0:
            extent = self.block if base == "%tid" else self.grid
            number = self.in_block if base == "%tid" else self.block_of + self.first_block
            values = (number % extent[0], number // extent[0] % extent[1], number // (extent[0] * extent[1]))[position]
        elif not axis:
            bit = np.uint64(1) << self.lane.astype(np.uint64)
            below = bit - np.uint64(1)
            everything = np.uint64(0xFFFFFFFF)
            others: dict[str, Numbers | int] = {
                "%cluster_ctarank": self.block_of % self.cluster,
                "%cluster_nctarank": self.cluster,
                "%laneid": self.lane,
                "%warpid": self.in_block // WARP,
                "%nwarpid": self.block_warps,
                "WARP_SZ": WARP,
                "%lanemask_eq": bit,
                "%lanemask_lt": below,
                "%lanemask_le": below | bit,
                "%lanemask_ge": everything & ~below,
                "%lanemask_gt": everything & ~(below | bit),
            }
            values = others.get(base)
        if values is None:
            return None
        return np.broadcast_to(np.asarray(values).astype(np.uint32), (self.count,)).copy()

    def describe(self, thread: int) -> str:
        """`thread (x, y, z) of block (x, y, z)` for an index into the arrays."""
        x, y, _ = self.block
        t, b = int(self.in_block[thread]), int(self.block_of[thread]) + self.first_block
        gx, gy, _ = self.grid
        return f"thread ({t % x}, {t // x % y}, {t // (x * y)}) of block ({b % gx}, {b // gx % gy}, {b // (gx * gy)})"


class ActiveThreads:
    """A set of threads that execute one instruction together. Immutable, so what is derived from the mask is derived
    once."""

    def __init__(self, threads: Threads, mask: Mask | None) -> None:
        """`mask` is a bool array over all threads, or None for all of them."""
        self.threads = threads
        self.mask = mask
        self.whole_warps_at: int | None = None
        """Which version of the living threads showed that their warps are whole; None for none."""
        self.whole_warpgroups = False
        """Whether their warpgroups have been found whole."""

    @property
    def all(self) -> bool:
        return self.mask is None

    @cached_property
    def full_mask(self) -> Mask:
        return np.ones(self.threads.count, np.bool_) if self.mask is None else self.mask

    @cached_property
    def inactive(self) -> Mask:
        return ~self.full_mask

    @cached_property
    def index(self) -> Numbers:
        """Indices of the active threads, ascending."""
        return np.flatnonzero(self.full_mask)

    @cached_property
    def by_warp(self) -> Mask:
        """The mask as `[warp, lane]`."""
        return self.full_mask.reshape(-1, WARP)

    @cached_property
    def warps(self) -> Numbers:
        """Indices of the warps that have an active thread, ascending."""
        return np.flatnonzero(self.by_warp.any(1))

    @cached_property
    def warpgroups(self) -> Numbers:
        """First warps of the warpgroups (four warps from a multiple of four on in their block) that have an active
        thread, ascending."""
        return np.unique(self.warps - self.warps % self.threads.block_warps % 4)

    @cached_property
    def blocks(self) -> Numbers:
        """Indices of the blocks that have an active thread, ascending."""
        return np.unique(self.warps // self.threads.block_warps)

    @cached_property
    def cluster_blocks(self) -> Numbers:
        """Indices of all blocks of the clusters that have an active thread, ascending: those whose shared memory may be
        accessed."""
        size = self.threads.cluster
        if size == 1:
            return self.blocks
        return (np.unique(self.blocks // size)[:, None] * size + np.arange(size)).ravel()

    @cached_property
    def warp_count(self) -> int:
        return len(self.warps)

    def select(self, values: NDArray[_T]) -> NDArray[_T]:
        """The active threads' elements of an array over all threads (or a 0-d array, made one element per thread)."""
        if self.mask is None:
            return values if values.ndim else np.broadcast_to(values, (self.threads.count,))
        return values[self.index] if values.ndim else np.broadcast_to(values, (len(self.index),))

    def where(self, predicate: Mask) -> ActiveThreads | None:
        """Those of them for which `predicate` (bool, over all threads) holds; None if there are none."""
        mask = predicate if self.mask is None else self.mask & predicate
        count = np.count_nonzero(mask)
        if count == 0:
            return None
        return self if count == len(self) else ActiveThreads(self.threads, mask.copy())

    def __len__(self) -> int:
        return self.threads.count if self.mask is None else len(self.index)
