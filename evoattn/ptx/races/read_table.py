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
    are dropped.
    """

    def __init__(self, order: HappensBefore, granules: int, shift: int, reading_agents: int) -> None:
        self.order, self.shift = order, shift
        self.columns = order.threads.cluster_warps + reading_agents
        self._flat = np.zeros(granules * self.columns, np.int32)
        self._waiting: list[tuple[int, list[Access]]] = []
        """(time, reads) that are not in the table yet."""

    @property
    def table(self) -> Numbers:
        """`[granule, column]` with time << 6 | lane. Columns are the warps of a cluster, then the reading agents."""
        return self._flat.reshape(-1, self.columns)

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
        at = accesses.granules * self.columns + warps % order.threads.cluster_warps
        before = self._flat[at]
        again = (before >> LANE_BITS > order.warp_floor[warps]) & (before & LANE_MASK != lanes)
        value = ((time << LANE_BITS) | np.where(again, SEVERAL, lanes)).astype(np.int32)
        np.maximum(value, before, out=value)  # a read recorded late does not hide a newer one
        self._flat[at] = value
        lost = self._flat[at] != value
        if lost.any():
            self._flat[at[lost]] = (time << LANE_BITS) | SEVERAL
