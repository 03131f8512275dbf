"""Data races in shared memory, as FastTrack finds them (Flanagan and Freund, PLDI 2009).

Memory is divided into granules of the smallest access that the kernel makes. For each granule the last write and each
warp's last read are kept, with their times; `happens_before.py` says which times are ordered.

A cp.async copy is in flight from its issue until its own thread has waited for it. Any access to its destination
meanwhile is a race; from then on the copy counts as a write by that thread at that moment. What the asynchronous proxy
of sm_90 does is told by `async_proxy.py`, on the same tables.

Accesses are gathered and checked together at the next synchronization: between two of them no access can be ordered
against another's."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from evoattn.ptx.memory.address_space import BankedMemory
from evoattn.ptx.program.kernel import Instruction, Mask, Numbers
from evoattn.ptx.program.threads import ActiveThreads, Threads
from evoattn.ptx.races.access import COPY, READ, WRITE, Access, Accesses, chunks, expand, those
from evoattn.ptx.races.happens_before import ENDED, SEVERAL, HappensBefore

LANE_BITS = 6
LANE_MASK = (1 << LANE_BITS) - 1


class ReadTable:
    """Reads wait outside the table until somebody writes to their blocks: most never race, for a barrier follows, and
    are dropped."""

    def __init__(self, order: HappensBefore, granules: int, shift: int, reading_agents: int) -> None:
        self.order, self.shift = order, shift
        self._threads, self._readers = order.threads, reading_agents
        self._of_block = granules // self._threads.block_count
        self._marks = np.zeros((self._threads.cluster_warps + reading_agents, granules), np.int32)
        """`[turned column, granule]` with time << 6 | lane; columns without a read take no memory."""
        self._used = np.zeros(len(self._marks), np.bool_)
        self._waiting: list[tuple[int, list[Access]]] = []
        """(time, reads) that are not in the table yet."""

    def _turned(self, columns: Numbers, blocks: Numbers | int, ahead: int) -> Numbers:
        """Columns are the warps of a cluster, then the reading agents. In the table a block's own come first, so that
        all blocks use the same few: turned so (`ahead` -1), or back (1)."""
        threads, warps = self._threads, self._threads.cluster_warps
        if threads.cluster == 1:
            return columns
        ranks = blocks % threads.cluster
        turned: Numbers = (columns + ahead * ranks * threads.block_warps) % warps
        if not self._readers:
            return turned
        agents = (columns - warps + ahead * ranks * (self._readers // threads.cluster)) % self._readers
        return np.where(columns < warps, turned, warps + agents)

    def mark(self, column: int, block: int, granules: Numbers | slice, stamp: int) -> None:
        """Granules of a block that a column reads now."""
        at = self._turned(np.array([column]), block, -1)[0]
        self._marks[at, granules] = stamp
        self._used[at] = True

    def mark_chunks(self, columns: Numbers, blocks: Numbers, chunks: Numbers, stamp: int) -> None:
        """Chunks of 16 bytes, `[column, chunk]`, that columns read now, each in the memory of its block."""
        at = self._turned(columns, blocks, -1)
        self._marks.reshape(len(self._marks), -1, 16 >> self.shift)[at[:, None], chunks] = stamp
        self._used[at] = True

    def last(self, granules: Numbers | slice) -> tuple[Numbers, Numbers]:
        """(turned columns that have any read, their last ones of these granules `[column, granule]`)."""
        used = np.flatnonzero(self._used)
        rows = [self._marks[column][granules] for column in used.tolist()]
        return used, np.array(rows, np.int32).reshape(len(rows), -1 if rows else 1)

    def columns_of(self, turned: Numbers, blocks: Numbers | int) -> Numbers:
        """The columns that are so turned for the memory of these blocks."""
        return self._turned(turned, blocks, 1)

    def block_of(self, granules: Numbers) -> Numbers:
        """The blocks that granules are in."""
        return granules // self._of_block

    def add(self, reads: list[Access]) -> None:
        """Reads that have happened now."""
        self._waiting.append((self.order.now, reads))

    def forget(self) -> None:
        """Drop reads that can no longer race, since all their blocks have met at a barrier."""
        left = []
        for time, reads in self._waiting:
            dangerous = those(reads, partial(self._is_dangerous, time))
            if dangerous:
                left.append((time, dangerous))
        self._waiting = left

    def record(self, writing: Sequence[Numbers]) -> None:
        """Put the reads into the table that writes to these blocks may race with."""
        is_written = np.zeros(self.order.threads.block_count, np.bool_)
        for blocks in writing:
            is_written[blocks] = True
        left = []
        for time, accesses in self._waiting:
            wanted = those(accesses, partial(self._is_wanted, time, is_written))
            for chunk in chunks(wanted):
                self._record(time, chunk)
            if len(wanted) < len(accesses):
                recorded = set(map(id, wanted))
                left.append((time, [access for access in accesses if id(access) not in recorded]))
        self._waiting = left

    def _is_dangerous(self, time: int, blocks: Numbers) -> bool:
        return bool(self._may_race(time, blocks).any())

    def _is_wanted(self, time: int, is_written: Mask, blocks: Numbers) -> bool:
        return bool((is_written[blocks] & self._may_race(time, blocks)).any())

    def _may_race(self, time: int, blocks: Numbers) -> Mask:
        """Per block: may a write race with reads from `time`? Barriers do not replace async-proxy fences."""
        floor = self.order.block_floor[blocks]
        result: Mask = floor < ENDED if self.order.agents else time > floor
        return result

    def _record(self, time: int, reads: Sequence[Access]) -> None:
        order, accesses = self.order, Accesses(reads, self.shift)
        lanes, warps = order.lane_of[accesses.actors], order.warp_of[accesses.actors]
        column = self._turned(warps % self._threads.cluster_warps, self.block_of(accesses.granules), -1)
        self._used[column] = True
        at = column * self._marks.shape[1] + accesses.granules
        flat = self._marks.reshape(-1)
        before = flat[at]
        again = (before >> LANE_BITS > order.warp_floor[warps]) & (before & LANE_MASK != lanes)
        value = ((time << LANE_BITS) | np.where(again, SEVERAL, lanes)).astype(np.int32)
        np.maximum(value, before, out=value)  # a read recorded late does not hide a newer one
        flat[at] = value
        lost = flat[at] != value
        if lost.any():
            flat[at[lost]] = (time << LANE_BITS) | SEVERAL


class Actors:
    """Names of those who access shared memory: threads, warps acting as one, agents of the asynchronous proxy. Of one
    machine; `agents` has the name of each agent of a cluster, and may be changed."""

    def __init__(self, threads: Threads, order: HappensBefore, agents: Sequence[str]) -> None:
        self.threads, self.order, self.agents = threads, order, list(agents)

    def name_of_column(self, column: int) -> str:
        """The reader that a column of the table of reads stands for."""
        if column >= self.threads.cluster_warps:
            return self.agents[column - self.threads.cluster_warps]
        rank, warp = divmod(column, self.threads.block_warps)
        return f"warp {warp}" + (f" of rank {rank}" if self.threads.cluster > 1 else "")

    def name(self, actor: int) -> str:
        """An actor; `HappensBefore` says which numbers are whose."""
        if actor >= self.order.first_agent:
            return self.agents[actor - self.order.first_agent]
        if actor >= self.threads.count:
            return self.name_of_column((actor - self.threads.count) % self.threads.cluster_warps)
        rank = f" of rank {self.threads.block_of[actor] % self.threads.cluster}" if self.threads.cluster > 1 else ""
        return f"thread {self.threads.in_block[actor]}{rank}"

    def block_of(self, actor: int) -> int:
        """The number in the grid of an actor's block."""
        return int(self.order.warp_of[actor]) // self.threads.block_warps + self.threads.first_block


THREAD_BITS = 20
THREAD_MASK = (1 << THREAD_BITS) - 1
_LOG_LIMIT = 1 << 22
"""Accesses (one per thread) kept before they are checked though nothing synchronized: 32 MiB."""
_LATEST = (1 << 31 - LANE_BITS) - 2
"""Time that the table of reads has room for."""


class SharedRaces:
    """Watches the shared memory of all blocks of a machine. `found` has a sentence for each racing instruction, by its
    pc."""

    def __init__(
        self,
        threads: Threads,
        shared: BankedMemory,
        granule: int,
        agents: Sequence[str] = (),
        reading_agents: int = 0,
        foreign: int = 0,
    ) -> None:
        """`granule` is in bytes, a power of two. `agents` has the name of each agent of the asynchronous proxy in a
        cluster; the first `reading_agents` of them read. `foreign` warps of the grid can be ordered with those of this
        machine."""
        self.threads = threads
        self.found: dict[int, str] = {}
        self.shift = granule.bit_length() - 1
        granules = len(shared.data) >> self.shift
        self.order = HappensBefore(threads, len(agents), foreign)
        self.actors = Actors(threads, self.order, agents)
        self.last_write = np.zeros(granules, np.int64)
        """By granule: time << 20 | actor."""
        self.reads = ReadTable(self.order, granules, self.shift, reading_agents)
        self.in_flight = np.zeros(granules, np.int32)
        """By granule: the thread that has a cp.async copy to it in flight, plus one; 0 for none."""
        self.copies = 0
        """Granules that are in flight."""
        self.newest_write = np.zeros(threads.block_count, np.int64)
        """By block: the time of the last write to its memory."""
        self._everyone = np.arange(threads.count)
        self._log: list[Access] = []
        self._logged = 0
        self._last_kind_was_copy = False

    # ---- what the machine tells it

    def access(
        self, kind: str, index: Numbers, size: int, active: ActiveThreads, ins: Instruction, by_warp: bool
    ) -> None:
        """`index` (byte of shared memory) of each active thread's access. With `by_warp` the accesses are made for the
        whole warp."""
        actors: Numbers = self._everyone if active.all else active.index
        if by_warp:
            actors = self.threads.count + self.threads.warp_of[actors]
        is_copy = kind == COPY
        if self._log and (is_copy != self._last_kind_was_copy or self._logged > _LOG_LIMIT):
            self.check()
        self._last_kind_was_copy = is_copy
        self._log.append(Access(kind, index, size, actors, active.cluster_blocks, ins))
        self._logged += len(index)

    def land(self, copies: Sequence[tuple[Numbers, int, Numbers]]) -> None:
        """Copies whose threads have waited for them now: byte, size and actor."""
        self.check()
        parts = [expand(index, size, actors, self.shift) for index, size, actors in copies]
        granules, actors = (np.concatenate(each) for each in zip(*parts))
        self.in_flight[granules] = 0
        self.copies -= len(granules)
        self.last_write[granules] = (self.order.now << THREAD_BITS) | actors
        self.newest_write[self.order.warp_of[actors] // self.threads.block_warps] = self.order.now

    def collide(self, thread: int, ins: Instruction) -> None:
        """Two threads wrote different values to one place by one instruction."""
        who = self.threads.describe(thread)
        self.report(ins, f"{who} writes where another thread writes a different value by the same instruction")

    def synchronize(self) -> HappensBefore:
        """The clocks, for a synchronization that happens now: what was accessed before it is checked first."""
        self.check()
        return self.order

    def barrier(self, blocks: Numbers) -> None:
        """All threads of these blocks met."""
        self.synchronize().barrier(blocks)
        self.reads.forget()

    def retire(self, blocks: Numbers) -> None:
        """All threads of these blocks have exited."""
        self.synchronize().retire(blocks)
        self.reads.forget()

    def report(self, ins: Instruction, what: str) -> None:
        self.found.setdefault(ins.index, f"Race in shared memory: {what}, in {ins}.")

    # ---- checking

    def check(self) -> None:
        """Check the accesses gathered since the last synchronization."""
        if not self._log:
            return
        log, self._log, self._logged = self._log, [], 0
        if self._last_kind_was_copy:
            self.reads.record([access.blocks for access in log])
            self._check_copies(Accesses(log, self.shift))
            return
        writes = [access for access in log if access.kind == WRITE]
        reads = [access for access in log if access.kind == READ]
        if writes:
            self.reads.record([access.blocks for access in writes])
            self._check_writes(Accesses(writes, self.shift))
            for access in writes:
                self.newest_write[access.blocks] = self.order.now
        if reads:
            self._check_reads(reads)
            self.reads.add(reads)

    def _check_writes(self, accesses: Accesses) -> None:
        self._check_against_writes(accesses)
        self._check_against_reads(accesses)
        stamped = (self.order.now << THREAD_BITS) | accesses.actors
        self.last_write[accesses.granules] = stamped
        (lost,) = (self.last_write[accesses.granules] != stamped).nonzero()
        if len(lost):
            self._check_overwritten(accesses, np.flatnonzero(np.isin(accesses.granules, accesses.granules[lost])))

    def _check_reads(self, reads: list[Access]) -> None:
        if not self.copies:
            floor = self.order.block_floor
            reads = those(reads, lambda blocks: bool((self.newest_write[blocks] > floor[blocks]).any()))
        for chunk in chunks(reads):
            self._check_against_writes(Accesses(chunk, self.shift))

    def _check_copies(self, accesses: Accesses) -> None:
        self._check_against_writes(accesses)
        self._check_against_reads(accesses)
        granules, issuers = accesses.granules, accesses.actors + 1
        self.in_flight[granules] = issuers
        self.copies += len(granules)
        for at in accesses.first_of_each(np.flatnonzero(self.in_flight[granules] != issuers)):
            other = self.actors.name(int(self.in_flight[granules[at]]) - 1)
            self._tell(accesses, at, f"an asynchronous copy of {other}")

    def _check_against_writes(self, accesses: Accesses) -> None:
        granules, actors = accesses.granules, accesses.actors
        last = self.last_write[granules]
        suspected = last >= (self.order.floor(actors) + 1) << THREAD_BITS
        if self.order.agents:
            # No barrier of the block orders what an agent wrote.
            suspected |= last & THREAD_MASK >= self.order.first_agent
        (suspects,) = (suspected & (last & THREAD_MASK != actors)).nonzero()
        if len(suspects):
            writer, time = last[suspects] & THREAD_MASK, last[suspects] >> THREAD_BITS
            columns, lanes = self.order.column_of[writer], self.order.lane_of[writer]
            racing = suspects[self.order.unordered(actors[suspects], columns, lanes, time)]
            for at in accesses.first_of_each(racing):
                self._tell(accesses, at, f"what {self.actors.name(int(last[at]) & THREAD_MASK)} wrote last")
        if self.copies:
            for at in accesses.first_of_each(np.flatnonzero(self.in_flight[granules])):
                issuer = self.actors.name(int(self.in_flight[granules[at]]) - 1)
                self._tell(accesses, at, f"an asynchronous copy that {issuer} has not yet waited for")

    def _check_against_reads(self, accesses: Accesses) -> None:
        used, last = self.reads.last(accesses.granules)
        floor = np.minimum(self.order.floor(accesses.actors), _LATEST).astype(np.int32)  # as wide as the table
        suspected = last >= (floor + 1) << LANE_BITS
        of_agents = used >= self.threads.cluster_warps  # what they read is ordered by no barrier of the block
        suspected[of_agents] = last[of_agents] >= 1 << LANE_BITS
        if not suspected.any():
            return
        turned, row = suspected.nonzero()
        values = last[turned, row].astype(np.int64)
        column = self.reads.columns_of(used[turned], self.reads.block_of(accesses.granules[row]))
        racing = self.order.unordered(accesses.actors[row], column, values & LANE_MASK, values >> LANE_BITS)
        readers = dict(zip(row[racing].tolist(), column[racing].tolist()))
        for at in accesses.first_of_each(np.unique(row[racing])):
            self._tell(accesses, at, f"what {self.actors.name_of_column(readers[at])} has read")

    def _check_overwritten(self, accesses: Accesses, at: Numbers) -> None:
        """Elements `at` are of granules that several actors wrote since the last synchronization.

        Equal values by one instruction are no race; `collide` is told of unequal ones."""
        entry = accesses.numbers(at)
        order = np.argsort(accesses.granules[at], kind="stable")
        at, entry = at[order], entry[order]
        granules, actors = accesses.granules[at], accesses.actors[at]
        begins = np.flatnonzero(np.r_[True, granules[1:] != granules[:-1]])
        others: dict[int, int] = {}
        # Where no two neighbours race, all later actors are the first one, and other actors' race with its later ones.
        for before in (np.r_[0, : len(at) - 1], np.repeat(begins, np.diff(np.r_[begins, len(at)]))):
            racing = granules == granules[before]
            racing &= (actors != actors[before]) & (entry != entry[before])
            others |= dict(zip(at[racing].tolist(), actors[before][racing].tolist()))
        for index in accesses.first_of_each(np.sort(np.fromiter(others, np.int64))):
            self._tell(accesses, index, f"what {self.actors.name(others[index])} wrote")

    def _tell(self, accesses: Accesses, at: int, what: str) -> None:
        access, actor = accesses.at(at), int(accesses.actors[at])
        verb = {READ: "reads", WRITE: "overwrites", COPY: "starts an asynchronous copy over"}[access.kind]
        who = f"{self.actors.name(actor)} of block {self.actors.block_of(actor)}"
        self.report(access.ins, f"{who} {verb} {what}, with no barrier between")
