"""Which accesses happened before which: vector clocks over the synchronizations of threads.

Time is one counter, `now`, that moves at every synchronization. An access at one time is ordered before another at a later time if a
synchronization between the two, in which both their warps took part, carries it over:
- a barrier of the whole block orders everything (`block_floor`), one of some warps what these warps knew (`_clock`);
- threads of one warp are ordered by `bar.warp.sync` and barriers alone (`warp_floor`): shuffles and matrix instructions order nothing.

An actor is a thread, or (from `threads.count` on) a warp acting as one.
"""

from __future__ import annotations

import numpy as np

from evoattn.ptx.threads import WARP, Threads

SEVERAL = 63
"""Stands for more than one lane of a warp."""
_ENDED = 1 << 40
"""Later than any time."""


class HappensBefore:
    """Clocks of all warps of a machine."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.now = 1
        self.block_floor = np.zeros(threads.block_count, np.int64)
        self.warp_floor = np.zeros(threads.warp_count, np.int64)
        self._clock = np.zeros((threads.warp_count, threads.block_warps), np.int64)  # [warp, warp of its block]: known of it up to then
        self._lane_clock: dict[int, np.ndarray] = {}      # of warps that synchronized in parts: [lane, other lane]
        self.warp_of = np.concatenate([threads.warp_of, np.arange(threads.warp_count)])
        self.lane_of = np.concatenate([threads.lane, np.full(threads.warp_count, SEVERAL)])

    def barrier(self, blocks: np.ndarray) -> None:
        """All threads of these blocks met."""
        self.block_floor[blocks] = self.now
        self.warp_floor.reshape(self.threads.block_count, -1)[blocks] = self.now
        self.now += 1

    def retire(self, blocks: np.ndarray) -> None:
        """All threads of these blocks have exited."""
        self.block_floor[blocks] = _ENDED

    def arrive(self, warp: int) -> np.ndarray:
        """A warp signals a barrier without waiting: what it hands over, `[warp of the block]`."""
        known = self._clock[warp].copy()
        known[warp % self.threads.block_warps] = self.now
        self.now += 1
        return known

    def barrier_of_warps(self, warps: np.ndarray, arrived: list[np.ndarray]) -> None:
        """Some warps of one block met; `arrived` is what others that only signalled handed over."""
        known = np.max([self._clock[warps].max(0), *arrived], axis=0)
        known[warps % self.threads.block_warps] = self.now
        self._clock[warps] = known
        self.warp_floor[warps] = self.now
        self.now += 1

    def warp_sync(self, warps: np.ndarray) -> None:
        """`bar.warp.sync` by all threads that are left of these warps."""
        self.warp_floor[warps] = self.now
        self.now += 1

    def warp_sync_in_parts(self, warps: np.ndarray, companions: np.ndarray) -> None:
        """`bar.warp.sync` by threads of these warps; `companions` (bool `[len(warps), lane, lane]`) tells who synchronized with whom."""
        for warp, groups in zip(warps.tolist(), companions):
            clock = self._lane_clock.setdefault(warp, np.zeros((WARP, WARP), np.int64))
            for group in np.unique(groups[groups.any(1)], axis=0):
                known = clock[group].max(0)
                known[group] = self.now
                clock[group] = known
        self.now += 1

    def floor(self, actors: np.ndarray) -> np.ndarray | int:
        """Time up to which everything in an actor's block is ordered before it."""
        first = int(self.block_floor[0])
        if len(self.block_floor) == 1 or (self.block_floor == first).all():
            return first
        return np.repeat(self.block_floor, self.threads.block_warps)[self.warp_of[actors]]

    def unordered(self, actors: np.ndarray, other_warp: np.ndarray, other_lane: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Bool: which accesses, made by others of the actors' blocks at `time`, are not ordered before what the actors do now.

        An actor's own earlier accesses are ordered; a lane that is `SEVERAL` differs from every other, itself included.
        """
        warp, lane = self.warp_of[actors], self.lane_of[actors]
        result = time > self._clock[warp, other_warp % self.threads.block_warps]
        same = warp == other_warp
        result[same] = ((time > self.warp_floor[warp]) & ((lane != other_lane) | (lane == SEVERAL)))[same]
        if self._lane_clock:
            for i in np.flatnonzero(result & same):
                clock = self._lane_clock.get(int(warp[i]))
                if clock is not None:
                    rows = clock if lane[i] == SEVERAL else clock[lane[i]]
                    known = rows.max() if other_lane[i] == SEVERAL else rows[..., other_lane[i]].min()
                    result[i] = time[i] > known
        return result
