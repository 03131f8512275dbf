"""Who read each granule of shared memory last: one entry for each warp and each reading agent."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from evoattn.ptx.program.arrays import Mask, Numbers
from evoattn.ptx.races.access import Access, Accesses, chunks, those
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
