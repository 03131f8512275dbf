"""Data races in shared memory, as FastTrack finds them (Flanagan and Freund, PLDI 2009), on granules of the smallest access a kernel makes.

For each granule the last write and each warp's last read are kept, with their times; `happens_before.py` says which times are ordered.
An asynchronous copy is in flight from its issue until its own thread has waited for it, and any access meanwhile is a race; from then on it
counts as a write by that thread at that moment.

Accesses are gathered and checked together at the next synchronization: between two of them no access can be ordered against another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from evoattn.ptx.address_space import BankedMemory
from evoattn.ptx.happens_before import SEVERAL, HappensBefore
from evoattn.ptx.program import Instruction
from evoattn.ptx.threads import ActiveThreads, Threads

_THREAD_BITS, _LANE_BITS = 20, 6
_THREAD_MASK, _LANE_MASK = (1 << _THREAD_BITS) - 1, (1 << _LANE_BITS) - 1
_LOG_LIMIT = 1 << 22
"""Accesses (one a thread) kept before they are checked though nothing synchronized: 32 MiB."""
_CHUNK = 1 << 14
"""Accesses of reads that are checked in one go: arrays that stay in the CPU's cache."""
READ, WRITE, COPY = "read", "write", "asynchronous copy"


@dataclass(frozen=True)
class _Access:
    kind: str
    index: np.ndarray
    size: int
    actors: np.ndarray
    blocks: np.ndarray
    """Blocks of the actors."""
    ins: Instruction


class RaceDetector:
    """Watches the shared memory of all blocks of a machine. `found` has a sentence for each racing instruction, by its pc."""

    def __init__(self, threads: Threads, shared: BankedMemory, granule: int) -> None:
        self.threads, self.shared = threads, shared
        self.found: dict[int, str] = {}
        self._shift = granule.bit_length() - 1
        granules = len(shared.data) >> self._shift
        warps = threads.block_warps
        self._last_write = np.zeros(granules, np.int64)             # time << 20 | actor
        self._last_read = np.zeros(granules * warps, np.int32)      # time << 6 | lane, for each warp of the block
        self._in_flight = np.zeros(granules, np.int32)              # issuing thread + 1
        self._copies = 0
        self.order = HappensBefore(threads)
        self._everyone = np.arange(threads.count)
        self._log: list[_Access] = []
        self._logged = 0
        self._unrecorded: list[tuple[int, list[_Access]]] = []       # (time, reads) not yet in `_last_read`
        self._newest_write = np.zeros(threads.block_count, np.int64)
        self._last_kind_was_copy = False

    # ---- what the machine tells it

    def access(self, kind: str, index: np.ndarray, size: int, active: ActiveThreads, ins: Instruction, by_warp: bool) -> None:
        """`index` (byte in `shared.data`) of each active thread's access. With `by_warp` the accesses are made for the whole warp."""
        actors = self._everyone if active.all else active.index
        if by_warp:
            actors = self.threads.count + self.threads.warp_of[actors]
        is_copy = kind == COPY
        if self._log and (is_copy != self._last_kind_was_copy or self._logged > _LOG_LIMIT):
            self.check()
        self._last_kind_was_copy = is_copy
        self._log.append(_Access(kind, index, size, actors, active.blocks, ins))
        self._logged += len(index)

    def land(self, index: np.ndarray, size: int, actors: np.ndarray) -> None:
        """Copies whose threads have waited for them."""
        self.check()
        granules, actors = self._expand(index, size, actors)
        self._in_flight[granules] = 0
        self._copies -= len(granules)
        self._last_write[granules] = (self.order.now << _THREAD_BITS) | actors
        self._newest_write[self.order.warp_of[actors] // self.threads.block_warps] = self.order.now

    def collide(self, thread: int, ins: Instruction) -> None:
        """Two threads wrote different values to one place by one instruction."""
        self._report(ins, f"{self.threads.describe(thread)} writes where another thread writes a different value by the same instruction")

    def synchronize(self) -> HappensBefore:
        """The clocks, for a synchronization that happens now: what was accessed before it is checked first."""
        self.check()
        return self.order

    def barrier(self, blocks: np.ndarray) -> None:
        """All threads of these blocks met."""
        self.synchronize().barrier(blocks)
        self._forget_reads()

    def retire(self, blocks: np.ndarray) -> None:
        """All threads of these blocks have exited."""
        self.synchronize().retire(blocks)
        self._forget_reads()

    def _forget_reads(self) -> None:
        """Drop reads that can no longer race, for all their blocks have met at a barrier since. Most reads never reach the tables."""
        left = []
        for time, reads in self._unrecorded:
            dangerous = self._those(reads, lambda blocks: time > int(self.order.block_floor[blocks].min()))
            if dangerous:
                left.append((time, dangerous))
        self._unrecorded = left

    @staticmethod
    def _those(accesses: list[_Access], holds: Callable[[np.ndarray], bool]) -> list[_Access]:
        """Accesses for whose blocks something holds; asked once for each set of blocks."""
        known: dict[int, bool] = {}
        for access in accesses:
            if id(access.blocks) not in known:
                known[id(access.blocks)] = holds(access.blocks)
        return [access for access in accesses if known[id(access.blocks)]]

    # ---- checking

    def check(self) -> None:
        """Check the accesses gathered since the last synchronization."""
        if not self._log:
            return
        log, self._log, self._logged = self._log, [], 0
        if self._last_kind_was_copy:
            self._record_reads(log)
            self._check_copies(log)
            return
        writes = [a for a in log if a.kind == WRITE]
        reads = [a for a in log if a.kind == READ]
        if writes:
            self._record_reads(writes)
            self._check_writes(writes)
        if reads:
            self._check_reads(reads)
            self._unrecorded.append((self.order.now, reads))

    def _expand(self, index: np.ndarray, size: int, actors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        granules, count = index >> self._shift, max(size >> self._shift, 1)
        if count == 1:
            return granules, actors
        return (granules[:, None] + np.arange(count)).ravel(), np.repeat(actors, count)

    def _gather(self, accesses: list[_Access]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Granules, actors, and where each access starts among them."""
        parts = [self._expand(a.index, a.size, a.actors) for a in accesses]
        starts = np.cumsum([0] + [len(granules) for granules, _ in parts])
        if len(parts) == 1:
            return *parts[0], starts
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts]), starts

    def _check_against_writes(self, granules: np.ndarray, actors: np.ndarray, starts: np.ndarray, accesses: list[_Access]) -> None:
        last = self._last_write[granules]
        suspects = np.flatnonzero((last >= (self.order.floor(actors) + 1) << _THREAD_BITS) & ((last & _THREAD_MASK) != actors))
        if len(suspects):
            writer = last[suspects] & _THREAD_MASK
            time = last[suspects] >> _THREAD_BITS
            racing = suspects[self.order.unordered(actors[suspects], self.order.warp_of[writer], self.order.lane_of[writer], time)]
            for at in self._first_of_each(racing, starts):
                self._tell(accesses, starts, at, actors[at], f"what {self._name(int(last[at]) & _THREAD_MASK)} wrote last")
        if self._copies:
            flying = np.flatnonzero(self._in_flight[granules])
            for at in self._first_of_each(flying, starts):
                issuer = int(self._in_flight[granules[at]]) - 1
                self._tell(accesses, starts, at, actors[at], f"an asynchronous copy that {self._name(issuer)} has not yet waited for")

    def _check_against_reads(self, granules: np.ndarray, actors: np.ndarray, starts: np.ndarray, accesses: list[_Access]) -> None:
        warps = self.threads.block_warps
        last = self._last_read.reshape(-1, warps)[granules]
        floor = self.order.floor(actors)
        limit = ((floor[:, None] if isinstance(floor, np.ndarray) else floor) + 1) << _LANE_BITS
        row, column = np.nonzero(last >= limit)
        if len(row):
            reader = self.order.warp_of[actors[row]] // warps * warps + column
            values = last[row, column].astype(np.int64)
            racing = self.order.unordered(actors[row], reader, values & _LANE_MASK, values >> _LANE_BITS)
            readers = dict(zip(row[racing].tolist(), reader[racing].tolist()))
            for at in self._first_of_each(np.unique(row[racing]), starts):
                self._tell(accesses, starts, at, actors[at], f"what warp {readers[int(at)] % warps} has read")

    def _check_writes(self, accesses: list[_Access]) -> None:
        granules, actors, starts = self._gather(accesses)
        self._check_against_writes(granules, actors, starts, accesses)
        self._check_against_reads(granules, actors, starts, accesses)
        stamped = (self.order.now << _THREAD_BITS) | actors
        self._last_write[granules] = stamped
        for access in accesses:
            self._newest_write[access.blocks] = self.order.now
        lost = np.flatnonzero(self._last_write[granules] != stamped)
        if len(lost):
            self._check_overwritten(np.isin(granules, granules[lost]), granules, actors, starts, accesses)

    def _check_overwritten(self, shared: np.ndarray, granules: np.ndarray, actors: np.ndarray, starts: np.ndarray,
                           accesses: list[_Access]) -> None:
        """Granules that several actors wrote since the last synchronization.

        Equal values by one instruction are no race; `collide` is told of unequal ones.
        """
        at = np.flatnonzero(shared)
        entry = np.searchsorted(starts, at, side="right") - 1
        order = np.argsort(granules[at], kind="stable")
        at, entry = at[order], entry[order]
        racing = (granules[at][1:] == granules[at][:-1]) & (actors[at][1:] != actors[at][:-1]) & (entry[1:] != entry[:-1])
        others = dict(zip(at[1:][racing].tolist(), actors[at[:-1]][racing].tolist()))
        for index in self._first_of_each(np.sort(at[1:][racing]), starts):
            self._tell(accesses, starts, index, actors[index], f"what {self._name(others[int(index)])} wrote")

    def _check_reads(self, accesses: list[_Access]) -> None:
        if not self._copies:
            accesses = self._those(accesses, lambda blocks: bool((self._newest_write[blocks] > self.order.block_floor[blocks]).any()))
        if not accesses:
            return
        for chunk in _chunks(accesses):
            granules, actors, starts = self._gather(chunk)
            self._check_against_writes(granules, actors, starts, chunk)

    def _record_reads(self, writing: list[_Access]) -> None:
        """Put the reads that these writes may race with into the table that they are checked against."""
        blocks_writing = np.zeros(self.threads.block_count, np.bool_)
        for access in writing:
            blocks_writing[access.blocks] = True
        left = []
        for time, accesses in self._unrecorded:
            wanted = self._those(accesses, lambda blocks: bool((blocks_writing[blocks] & (time > self.order.block_floor[blocks])).any()))
            for chunk in _chunks(wanted):
                self._record(time, chunk)
            if len(wanted) < len(accesses):
                recorded = set(map(id, wanted))
                left.append((time, [access for access in accesses if id(access) not in recorded]))
        self._unrecorded = left

    def _record(self, time: int, accesses: list[_Access]) -> None:
        granules, actors, _ = self._gather(accesses)
        lanes, warps = self.order.lane_of[actors], self.order.warp_of[actors]
        at = granules * self.threads.block_warps + warps % self.threads.block_warps
        before = self._last_read[at]
        again = (before >> _LANE_BITS > self.order.warp_floor[warps]) & (before & _LANE_MASK != lanes)
        value = ((time << _LANE_BITS) | np.where(again, SEVERAL, lanes)).astype(np.int32)
        np.maximum(value, before, out=value)             # a read recorded late does not hide a newer one
        self._last_read[at] = value
        lost = self._last_read[at] != value
        if lost.any():
            self._last_read[at[lost]] = (time << _LANE_BITS) | SEVERAL

    def _check_copies(self, accesses: list[_Access]) -> None:
        granules, actors, starts = self._gather(accesses)
        self._check_against_writes(granules, actors, starts, accesses)
        self._check_against_reads(granules, actors, starts, accesses)
        self._in_flight[granules] = actors + 1
        self._copies += len(granules)
        for at in self._first_of_each(np.flatnonzero(self._in_flight[granules] != actors + 1), starts):
            self._tell(accesses, starts, at, actors[at], f"an asynchronous copy of {self._name(int(self._in_flight[granules[at]]) - 1)}")

    # ---- reporting

    def _first_of_each(self, positions: np.ndarray, starts: np.ndarray) -> list[int]:
        """The first racing element of each access."""
        if not len(positions):
            return []
        _, first = np.unique(np.searchsorted(starts, positions, side="right"), return_index=True)
        return positions[first].tolist()

    def _name(self, actor: int) -> str:
        if actor >= self.threads.count:
            return f"warp {(actor - self.threads.count) % self.threads.block_warps}"
        return f"thread {int(self.threads.in_block[actor])}"

    def _tell(self, accesses: list[_Access], starts: np.ndarray, at: int, actor: int, what: str) -> None:
        access = accesses[int(np.searchsorted(starts, at, side="right")) - 1]
        verb = {READ: "reads", WRITE: "overwrites", COPY: "starts an asynchronous copy over"}[access.kind]
        block = int(self.order.warp_of[actor]) // self.threads.block_warps + self.threads.first_block
        self._report(access.ins, f"{self._name(int(actor))} of block {block} {verb} {what}, with no barrier between")

    def _report(self, ins: Instruction, what: str) -> None:
        self.found.setdefault(ins.index, f"Race in shared memory: {what}, in {ins}.")


def _chunks(accesses: list[_Access]) -> Iterator[list[_Access]]:
    """Consecutive parts of about `_CHUNK` accesses."""
    start = total = 0
    for i, access in enumerate(accesses):
        total += len(access.index)
        if total >= _CHUNK:
            yield accesses[start:i + 1]
            start, total = i + 1, 0
    if start < len(accesses):
        yield accesses[start:]
