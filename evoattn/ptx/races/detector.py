"""Data races in shared memory, as FastTrack finds them (Flanagan and Freund, PLDI 2009), on granules of the smallest access a kernel makes.

For each granule the last write and each warp's last read are kept, with their times; `happens_before.py` says which times are ordered.
An asynchronous copy is in flight from its issue until its own thread has waited for it, and any access meanwhile is a race; from then on it
counts as a write by that thread at that moment. What the asynchronous proxy of sm_90 does is told by `async_races.py`, on the same tables.

Accesses are gathered and checked together at the next synchronization: between two of them no access can be ordered against another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from evoattn.ptx.memory.address_space import BankedMemory
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.threads import ActiveThreads, Threads
from evoattn.ptx.races.happens_before import ENDED, SEVERAL, HappensBefore

THREAD_BITS, LANE_BITS = 20, 6
THREAD_MASK, LANE_MASK = (1 << THREAD_BITS) - 1, (1 << LANE_BITS) - 1
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
    """Blocks whose memory the actors may access."""
    ins: Instruction


class RaceDetector:
    """Watches the shared memory of all blocks of a machine. `found` has a sentence for each racing instruction, by its pc."""

    def __init__(
        self,
        threads: Threads,
        shared: BankedMemory,
        granule: int,
        agents: Sequence[str] = (),
        reading_agents: int = 0,
        foreign: int = 0,
    ) -> None:
        """`agents` has the name of each agent of the asynchronous proxy in a cluster; the first `reading_agents` of them read."""
        self.threads, self.shared, self.agents = threads, shared, list(agents)
        self.found: dict[int, str] = {}
        self.shift = granule.bit_length() - 1
        granules = len(shared.data) >> self.shift
        self.columns = threads.cluster_warps + reading_agents
        self.last_write = np.zeros(granules, np.int64)  # time << 20 | actor
        self._last_read = np.zeros(
            granules * self.columns, np.int32
        )  # time << 6 | lane, for each warp and agent of the cluster
        self.in_flight = np.zeros(granules, np.int32)  # issuing thread + 1
        self.copies = 0
        self.order = HappensBefore(threads, len(self.agents), foreign)
        self._everyone = np.arange(threads.count)
        self._log: list[_Access] = []
        self._logged = 0
        self._unrecorded: list[tuple[int, list[_Access]]] = []  # (time, reads) not yet in `_last_read`
        self.newest_write = np.zeros(threads.block_count, np.int64)
        self._last_kind_was_copy = False

    # ---- what the machine tells it

    def access(
        self, kind: str, index: np.ndarray, size: int, active: ActiveThreads, ins: Instruction, by_warp: bool
    ) -> None:
        """`index` (byte in `shared.data`) of each active thread's access. With `by_warp` the accesses are made for the whole warp."""
        actors = self._everyone if active.all else active.index
        if by_warp:
            actors = self.threads.count + self.threads.warp_of[actors]
        is_copy = kind == COPY
        if self._log and (is_copy != self._last_kind_was_copy or self._logged > _LOG_LIMIT):
            self.check()
        self._last_kind_was_copy = is_copy
        self._log.append(_Access(kind, index, size, actors, active.cluster_blocks, ins))
        self._logged += len(index)

    def land(self, index: np.ndarray, size: int, actors: np.ndarray) -> None:
        """Copies whose threads have waited for them."""
        self.check()
        granules, actors = self._expand(index, size, actors)
        self.in_flight[granules] = 0
        self.copies -= len(granules)
        self.last_write[granules] = (self.order.now << THREAD_BITS) | actors
        self.newest_write[self.order.warp_of[actors] // self.threads.block_warps] = self.order.now

    def collide(self, thread: int, ins: Instruction) -> None:
        """Two threads wrote different values to one place by one instruction."""
        self.report(
            ins,
            f"{self.threads.describe(thread)} writes where another thread writes a different value by the same instruction",
        )

    @property
    def last_read(self) -> np.ndarray:
        """`[granule, column]` with time << 6 | lane."""
        return self._last_read.reshape(-1, self.columns)

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
            dangerous = self._those(reads, lambda blocks: bool(self._may_race(time, blocks).any()))
            if dangerous:
                left.append((time, dangerous))
        self._unrecorded = left

    def _may_race(self, time: int, blocks: np.ndarray) -> np.ndarray:
        """Bool, of each block: whether writes may race with reads of that time. No barrier stands for a fence of the asynchronous proxy."""
        floor = self.order.block_floor[blocks]
        return floor < ENDED if self.agents else time > floor

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
            self.record_reads([access.blocks for access in log])
            self._check_copies(log)
            return
        writes = [a for a in log if a.kind == WRITE]
        reads = [a for a in log if a.kind == READ]
        if writes:
            self.record_reads([access.blocks for access in writes])
            self._check_writes(writes)
        if reads:
            self._check_reads(reads)
            self._unrecorded.append((self.order.now, reads))

    def _expand(self, index: np.ndarray, size: int, actors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        granules, count = index >> self.shift, max(size >> self.shift, 1)
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

    def _check_against_writes(
        self, granules: np.ndarray, actors: np.ndarray, starts: np.ndarray, accesses: list[_Access]
    ) -> None:
        last = self.last_write[granules]
        suspected = last >= (self.order.floor(actors) + 1) << THREAD_BITS
        if self.agents:
            suspected |= (
                last & THREAD_MASK >= self.order.first_agent
            )  # no barrier of the block orders what an agent wrote
        suspects = np.flatnonzero(suspected & (last & THREAD_MASK != actors))
        if len(suspects):
            writer = last[suspects] & THREAD_MASK
            time = last[suspects] >> THREAD_BITS
            racing = suspects[
                self.order.unordered(actors[suspects], self.order.column_of[writer], self.order.lane_of[writer], time)
            ]
            for at in self._first_of_each(racing, starts):
                self._tell(
                    accesses, starts, at, actors[at], f"what {self.name(int(last[at]) & THREAD_MASK)} wrote last"
                )
        if self.copies:
            flying = np.flatnonzero(self.in_flight[granules])
            for at in self._first_of_each(flying, starts):
                issuer = int(self.in_flight[granules[at]]) - 1
                self._tell(
                    accesses,
                    starts,
                    at,
                    actors[at],
                    f"an asynchronous copy that {self.name(issuer)} has not yet waited for",
                )

    def _check_against_reads(
        self, granules: np.ndarray, actors: np.ndarray, starts: np.ndarray, accesses: list[_Access]
    ) -> None:
        last = self.last_read[granules]
        floor = self.order.floor(actors)
        limit = ((floor[:, None] if isinstance(floor, np.ndarray) else floor) + 1) << LANE_BITS
        if self.columns > self.threads.cluster_warps:  # what agents read is ordered by no barrier of the block
            limit = np.where(np.arange(self.columns) < self.threads.cluster_warps, limit, 1 << LANE_BITS)
        row, column = np.nonzero(last >= limit)
        if len(row):
            values = last[row, column].astype(np.int64)
            racing = self.order.unordered(actors[row], column, values & LANE_MASK, values >> LANE_BITS)
            readers = dict(zip(row[racing].tolist(), column[racing].tolist()))
            for at in self._first_of_each(np.unique(row[racing]), starts):
                self._tell(accesses, starts, at, actors[at], f"what {self.name_of_column(readers[int(at)])} has read")

    def _check_writes(self, accesses: list[_Access]) -> None:
        granules, actors, starts = self._gather(accesses)
        self._check_against_writes(granules, actors, starts, accesses)
        self._check_against_reads(granules, actors, starts, accesses)
        stamped = (self.order.now << THREAD_BITS) | actors
        self.last_write[granules] = stamped
        for access in accesses:
            self.newest_write[access.blocks] = self.order.now
        lost = np.flatnonzero(self.last_write[granules] != stamped)
        if len(lost):
            self._check_overwritten(np.isin(granules, granules[lost]), granules, actors, starts, accesses)

    def _check_overwritten(
        self, shared: np.ndarray, granules: np.ndarray, actors: np.ndarray, starts: np.ndarray, accesses: list[_Access]
    ) -> None:
        """Granules that several actors wrote since the last synchronization.

        Equal values by one instruction are no race; `collide` is told of unequal ones.
        """
        at = np.flatnonzero(shared)
        entry = np.searchsorted(starts, at, side="right") - 1
        order = np.argsort(granules[at], kind="stable")
        at, entry = at[order], entry[order]
        racing = (
            (granules[at][1:] == granules[at][:-1]) & (actors[at][1:] != actors[at][:-1]) & (entry[1:] != entry[:-1])
        )
        others = dict(zip(at[1:][racing].tolist(), actors[at[:-1]][racing].tolist()))
        for index in self._first_of_each(np.sort(at[1:][racing]), starts):
            self._tell(accesses, starts, index, actors[index], f"what {self.name(others[int(index)])} wrote")

    def _check_reads(self, accesses: list[_Access]) -> None:
        if not self.copies:
            accesses = self._those(
                accesses, lambda blocks: bool((self.newest_write[blocks] > self.order.block_floor[blocks]).any())
            )
        if not accesses:
            return
        for chunk in _chunks(accesses):
            granules, actors, starts = self._gather(chunk)
            self._check_against_writes(granules, actors, starts, chunk)

    def record_reads(self, writing: list[np.ndarray]) -> None:
        """Put the reads that writes may race with into the table that they are checked against; `writing` has the blocks that write."""
        blocks_writing = np.zeros(self.threads.block_count, np.bool_)
        for blocks in writing:
            blocks_writing[blocks] = True
        left = []
        for time, accesses in self._unrecorded:
            wanted = self._those(
                accesses, lambda blocks: bool((blocks_writing[blocks] & self._may_race(time, blocks)).any())
            )
            for chunk in _chunks(wanted):
                self._record(time, chunk)
            if len(wanted) < len(accesses):
                recorded = set(map(id, wanted))
                left.append((time, [access for access in accesses if id(access) not in recorded]))
        self._unrecorded = left

    def _record(self, time: int, accesses: list[_Access]) -> None:
        granules, actors, _ = self._gather(accesses)
        lanes, warps = self.order.lane_of[actors], self.order.warp_of[actors]
        at = granules * self.columns + warps % self.threads.cluster_warps
        before = self._last_read[at]
        again = (before >> LANE_BITS > self.order.warp_floor[warps]) & (before & LANE_MASK != lanes)
        value = ((time << LANE_BITS) | np.where(again, SEVERAL, lanes)).astype(np.int32)
        np.maximum(value, before, out=value)  # a read recorded late does not hide a newer one
        self._last_read[at] = value
        lost = self._last_read[at] != value
        if lost.any():
            self._last_read[at[lost]] = (time << LANE_BITS) | SEVERAL

    def _check_copies(self, accesses: list[_Access]) -> None:
        granules, actors, starts = self._gather(accesses)
        self._check_against_writes(granules, actors, starts, accesses)
        self._check_against_reads(granules, actors, starts, accesses)
        self.in_flight[granules] = actors + 1
        self.copies += len(granules)
        for at in self._first_of_each(np.flatnonzero(self.in_flight[granules] != actors + 1), starts):
            self._tell(
                accesses,
                starts,
                at,
                actors[at],
                f"an asynchronous copy of {self.name(int(self.in_flight[granules[at]]) - 1)}",
            )

    # ---- reporting

    def _first_of_each(self, positions: np.ndarray, starts: np.ndarray) -> list[int]:
        """The first racing element of each access."""
        if not len(positions):
            return []
        _, first = np.unique(np.searchsorted(starts, positions, side="right"), return_index=True)
        return positions[first].tolist()

    def name_of_column(self, column: int) -> str:
        """The reader that a column of `last_read` stands for."""
        if column >= self.threads.cluster_warps:
            return self.agents[column - self.threads.cluster_warps]
        rank, warp = divmod(column, self.threads.block_warps)
        return f"warp {warp}" + (f" of rank {rank}" if self.threads.cluster > 1 else "")

    def name(self, actor: int) -> str:
        if actor >= self.order.first_agent:
            return self.agents[actor - self.order.first_agent]
        if actor >= self.threads.count:
            return self.name_of_column((actor - self.threads.count) % self.threads.cluster_warps)
        rank = (
            f" of rank {int(self.threads.block_of[actor]) % self.threads.cluster}" if self.threads.cluster > 1 else ""
        )
        return f"thread {int(self.threads.in_block[actor])}{rank}"

    def _tell(self, accesses: list[_Access], starts: np.ndarray, at: int, actor: int, what: str) -> None:
        access = accesses[int(np.searchsorted(starts, at, side="right")) - 1]
        verb = {READ: "reads", WRITE: "overwrites", COPY: "starts an asynchronous copy over"}[access.kind]
        block = int(self.order.warp_of[actor]) // self.threads.block_warps + self.threads.first_block
        self.report(access.ins, f"{self.name(int(actor))} of block {block} {verb} {what}, with no barrier between")

    def report(self, ins: Instruction, what: str) -> None:
        self.found.setdefault(ins.index, f"Race in shared memory: {what}, in {ins}.")


def _chunks(accesses: list[_Access]) -> Iterator[list[_Access]]:
    """Consecutive parts of about `_CHUNK` accesses."""
    start = total = 0
    for i, access in enumerate(accesses):
        total += len(access.index)
        if total >= _CHUNK:
            yield accesses[start : i + 1]
            start, total = i + 1, 0
    if start < len(accesses):
        yield accesses[start:]
