"""Data races in global memory between the threads of a launch: two touch the same bytes, one writes, and nothing orders
the two.

For each granule (the smallest access that the kernel makes) the last weak write is kept, with its time; strong accesses
(atomics, `.relaxed`, `.volatile` …) race with weak ones only, and are kept one by one. Reads are kept for those buffers
that the launch also writes. Which these are shows when it does both; `unwatched` then has them, and the launch is to be
run again with these buffers watched. Blocks may run one after another: only what `global_order.py` and the clocks say
counts as order, not who came first."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from evoattn.ptx.memory.global_buffers import GlobalMemory
from evoattn.ptx.program.kernel import Instruction, Kernel, Mask, Numbers
from evoattn.ptx.program.threads import WARP, Threads
from evoattn.ptx.races.access import READ, expand, global_granule
from evoattn.ptx.races.global_order import GlobalOrder, orders_blocks
from evoattn.ptx.races.grid_dependency import GridDependency, Touched
from evoattn.ptx.races.happens_before import HappensBefore


@dataclass(frozen=True)
class Accesses:
    """One of each entry."""

    granules: Numbers
    threads: Numbers
    """Of the grid."""
    times: Numbers
    wrote: Mask
    numbers: Numbers
    """In the order in which they were made."""

    def take(self, chosen: Numbers | Mask) -> Accesses:
        """Those chosen by index or mask."""
        return Accesses(*(getattr(self, field.name)[chosen] for field in fields(self)))


class StrongAccesses:
    """Of one launch."""

    def __init__(self, granules: int) -> None:
        """`granules`: how many there are."""
        self._new: list[tuple[Numbers, Numbers, int, bool]] = []
        none = np.zeros(0, np.int64)
        self._sorted = Accesses(none, none, none, np.zeros(0, np.bool_), none)
        self._forgotten = np.zeros(granules, np.int64)
        """By granule: the number of the first access that counts."""
        self._count = 0

    def add(self, granules: Numbers, threads: Numbers, time: int, wrote: bool) -> None:
        """Accesses by one instruction, one of each granule and its thread."""
        self._new.append((granules, threads, time, wrote))

    def forget(self, granules: Numbers) -> None:
        """All that was done to these so far."""
        self._sort()
        self._forgotten[granules] = self._count

    def of(self, granules: Numbers) -> tuple[Numbers, Accesses]:
        """The accesses of these granules, and of each the index of its granule among them."""
        self._sort()
        first = np.searchsorted(self._sorted.granules, granules, "left")
        counts = np.searchsorted(self._sorted.granules, granules, "right") - first
        at = np.repeat(np.arange(len(granules)), counts)
        index = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(len(at))
        found = self._sorted.take(index)
        counting = found.numbers >= self._forgotten[found.granules]
        return at[counting], found.take(counting)

    def _sort(self) -> None:
        if not self._new:
            return
        sizes = [len(granules) for granules, *_ in self._new]
        total = sum(sizes)
        new = Accesses(
            np.concatenate([granules for granules, *_ in self._new]),
            np.concatenate([threads for _, threads, *_ in self._new]),
            np.repeat([time for _, _, time, _ in self._new], sizes),
            np.repeat([wrote for *_, wrote in self._new], sizes),
            np.arange(self._count, self._count + total),
        )
        self._new.clear()
        self._count += total
        both = Accesses(
            *(np.concatenate([getattr(part, f.name) for part in (self._sorted, new)]) for f in fields(Accesses))
        )
        both = both.take(both.numbers >= self._forgotten[both.granules])
        self._sorted = both.take(np.argsort(both.granules, kind="stable"))


_THREAD_BITS = 26
_THREAD_MASK = (1 << _THREAD_BITS) - 1


class _Reads:
    """Of watched buffers, in the order in which they came."""

    def __init__(self, granules: int) -> None:
        """`granules`: how many the arena has."""
        self._parts: list[tuple[Numbers, Numbers, Numbers]] = []
        """Granules, threads and times, in few parts."""
        self._writer = np.zeros(granules, np.int64)
        """Of the granules that are asked for: whom `of` was told, and 1; for all others 0."""

    def add(self, granules: Numbers, threads: Numbers, time: int) -> None:
        """By one instruction, by these threads of the grid."""
        self._parts.append((granules, threads, np.full(len(granules), time)))

    def of(self, granules: Numbers, actors: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Of each read of these granules, after at least one: the granule, who read, when, and the actor beside the
        granule (of several the last)."""
        if len(self._parts) > 1:
            granules_read, threads, times = zip(*self._parts)
            self._parts = [(np.concatenate(granules_read), np.concatenate(threads), np.concatenate(times))]
        ((read, readers, moments),) = self._parts
        self._writer[granules] = actors + 1
        own = self._writer[read]
        self._writer[granules] = 0
        again = np.flatnonzero(own)
        return read[again], readers[again], moments[again], own[again] - 1


class GlobalRaces:
    """Of one launch. `found` has a sentence for each racing instruction, by its pc."""

    def __init__(
        self, kernel: Kernel, memory: GlobalMemory, grid_warps: int, watched: frozenset[int], before: Touched | None
    ) -> None:
        """`watched` are the numbers of the buffers of which reads are kept; `before` is given where earlier launches
        may not have ended."""
        self.memory, self.watched = memory, watched
        self.dependency = None if before is None else GridDependency(memory, before)
        self.grid_warps = grid_warps if orders_blocks(kernel) else 0
        self.found: dict[int, str] = {}
        self.now = 1
        self.order_of_blocks = GlobalOrder()
        self._shift = global_granule(kernel).bit_length() - 1
        self._last_write = np.zeros(len(memory.data) >> self._shift, np.int64)  # time << 26 | thread of the grid
        self._was_read = np.zeros(len(self._last_write) if watched else 0, np.bool_)
        self._read_only = np.zeros(len(self._was_read), np.bool_)
        """By granule: whether `ld.global.nc` has read it."""
        self._reads = _Reads(len(self._was_read))
        self._strong = StrongAccesses(len(self._last_write))
        self._had_strong = np.zeros(len(self._last_write), np.bool_)
        self._read_buffers: set[int] = set()
        self._written_buffers: set[int] = set()

    @property
    def unwatched(self) -> set[int]:
        """Buffers that are read and written, and of which reads were not kept."""
        return (self._read_buffers & self._written_buffers) - self.watched

    @property
    def touched(self) -> Touched:
        return Touched(frozenset(self._read_buffers), frozenset(self._written_buffers))

    def attach(self, threads: Threads, order: HappensBefore) -> None:
        """These blocks run now, by these clocks."""
        self.threads, self.order = threads, order
        if self.dependency is not None:
            self.dependency.attach(threads)
        order.now = self.now
        self._first_thread = threads.first_block * threads.block_threads
        self.order_of_blocks.attach(threads, order)

    def detach(self) -> None:
        """They have ended."""
        self.now = self.order.now + 1

    def watches(self, index: int) -> bool:
        """Whether reads of the buffer that has this byte of the arena are kept."""
        return self.memory.buffer_at(index) in self.watched

    # ---- what the machine tells it

    def access(self, kind: str, index: Numbers, size: int, threads: Numbers, ins: Instruction) -> None:
        """Weak accesses of `size` bytes at `index` of the arena, one per thread of the machine."""
        if self.dependency is not None:
            self.dependency.access(kind != READ, index, threads, ins)
        first, last = int(index.min()), int(index.max())
        buffers = {self.memory.buffer_at(first), self.memory.buffer_at(last)}
        if kind == READ:
            self._read_buffers |= buffers
            if not buffers & self.watched:
                return
        else:
            self._written_buffers |= buffers
            self.order_of_blocks.overwrite(first, last, index)
        granules, actors = expand(index, size, threads, self._shift)
        self._check_read_only(kind, granules, ins)
        self._check_against_writes(kind, granules, actors, ins)
        self._check_against_strong(kind, granules, actors, ins)
        if kind == READ:
            self._was_read[granules] = True
            self._reads.add(granules, actors + self._first_thread, self.order.now)
        else:
            self._check_against_reads(granules, actors, ins)
            stamped = self.order.now << _THREAD_BITS | actors + self._first_thread
            self._last_write[granules] = stamped
            self._check_together(stamped, granules, actors, ins)

    def strong(self, writes: bool, index: Numbers, size: int, threads: Numbers, ins: Instruction) -> None:
        """As `access`, of strong accesses; `order_of_blocks` is told on its own."""
        if self.dependency is not None:
            self.dependency.access(writes, index, threads, ins)
        buffers = {self.memory.buffer_at(int(index.min())), self.memory.buffer_at(int(index.max()))}
        self._read_buffers |= buffers
        self._written_buffers |= buffers if writes else set()
        granules, actors = expand(index, size, threads, self._shift)
        self._check_against_writes("atomically accesses", granules, actors, ins)
        if writes:
            self._check_against_reads(granules, actors, ins)
        self._had_strong[granules] = True
        self._strong.add(granules, actors + self._first_thread, self.order.now, writes)

    # ---- checking

    def _unordered(self, actors: Numbers, others: Numbers, time: Numbers) -> Mask:
        """Bool: which accesses by other threads of the grid are not ordered before what these threads of the machine do
        now."""
        threads, order = self.threads, self.order
        warps, other_warps = order.warp_of[actors], others // WARP
        result: Mask = others != actors + self._first_thread
        if self.grid_warps:
            result &= time > self.order_of_blocks.known[warps, other_warps]
        local = others - self._first_thread
        near = result & (local >= 0) & (local < threads.count)
        near[near] = local[near] // (WARP * threads.cluster_warps) == warps[near] // threads.cluster_warps
        if near.any():
            own, other = actors[near], local[near]
            late = order.unordered(own, order.column_of[other], order.lane_of[other], time[near])
            late &= (time[near] > order.floor(own)) | (threads.block_of[own] != threads.block_of[other])
            result[near] = late
        return result

    def _check_read_only(self, kind: str, granules: Numbers, ins: Instruction) -> None:
        """What `ld.global.nc` reads must be read-only for all of the launch, whatever the order (PTX ISA, ld)."""
        if kind != READ:
            wrong = self._read_only[granules] if len(self._read_only) else np.zeros(0, np.bool_)
            what = "writes what ld.global.nc has read"
        elif ".nc" in ins.opcode:
            self._read_only[granules] = True
            wrong = self._last_write[granules] > 0
            what = "reads as if nobody wrote it (.nc) what this launch has written"
        else:
            return
        if wrong.any():
            place = self.memory.describe(int(granules[wrong.argmax()]) << self._shift)
            self.found.setdefault(ins.index, f"A thread {what}, {place}, in {ins}.")

    def _check_against_writes(self, kind: str, granules: Numbers, actors: Numbers, ins: Instruction) -> None:
        last = self._last_write[granules]
        written = np.flatnonzero(last)
        if len(written):
            writers, time = last[written] & _THREAD_MASK, last[written] >> _THREAD_BITS
            racing = np.flatnonzero(self._unordered(actors[written], writers, time))
            if len(racing):
                at = written[racing[0]]
                self._tell(ins, int(actors[at]), kind, int(granules[at]), int(writers[racing[0]]), "wrote")

    def _check_against_reads(self, granules: Numbers, actors: Numbers, ins: Instruction) -> None:
        if not len(self._was_read) or not self._was_read[granules].any():
            return
        read, threads, times, own = self._reads.of(granules, actors)
        late = self._unordered(own, threads, times)
        if late.any():
            at = int(late.argmax())
            self._tell(ins, int(own[at]), "overwrites", int(read[at]), int(threads[at]), "read")

    def _check_against_strong(self, kind: str, granules: Numbers, actors: Numbers, ins: Instruction) -> None:
        """A weak access against the strong ones of its granules, of which a weak write that is in order leaves none to
        look at."""
        met = np.flatnonzero(self._had_strong[granules])
        if not len(met):
            return
        at, strong = self._strong.of(granules[met])
        late = self._unordered(actors[met][at], strong.threads, strong.times)
        known = np.zeros(len(met), np.int64)  # and what came before: atomics on one place follow one another
        np.maximum.at(known, at, np.where(~late & strong.wrote, strong.times, 0))
        late &= strong.times > known[at]
        if kind == READ:
            late &= strong.wrote
        if late.any():
            first = int(late.argmax())
            place = met[at[first]]
            self._tell(
                ins, int(actors[place]), kind, int(granules[place]), int(strong.threads[first]), "atomically accessed"
            )
        elif kind != READ:
            self._had_strong[granules] = False
            self._strong.forget(granules[met])

    def _check_together(self, stamped: Numbers, granules: Numbers, actors: Numbers, ins: Instruction) -> None:
        """Threads of several blocks that wrote one place by one instruction."""
        left = self._last_write[granules]
        for at in np.flatnonzero(left != stamped)[:1].tolist():
            other = int(left[at]) & _THREAD_MASK
            if other // self.threads.block_threads != self.threads.block_of[actors[at]] + self.threads.first_block:
                self._tell(ins, int(actors[at]), "writes", int(granules[at]), other, "writes")

    def _tell(self, ins: Instruction, actor: int, kind: str, granule: int, other: int, did: str) -> None:
        def name(thread: int) -> str:
            return f"thread {thread % self.threads.block_threads} of block {thread // self.threads.block_threads}"

        place = self.memory.describe(granule << self._shift)
        verb = {"read": "reads", "write": "writes"}.get(kind, kind)
        self.found.setdefault(
            ins.index,
            (
                f"Race in global memory: {name(actor + self._first_thread)} {verb} what {name(other)} {did} {place}, "
                "and nothing orders the "
                f"two, in {ins}."
            ),
        )


def bytes_of(part: Numbers, memory: GlobalMemory) -> Numbers:
    """Index in the arena of every element of a view into it."""
    index = np.array([part.__array_interface__["data"][0] - memory.data.ctypes.data])
    for count, stride in zip(part.shape, part.strides):
        index = np.add.outer(index, np.arange(count) * stride).ravel()
    return index
