"""Which accesses happened before which: vector clocks over the synchronizations of threads.

Time is one counter, `now`, that moves at every synchronization. An access at one time is ordered before another at a
later time if a synchronization between the two, in which both their warps took part, carries it over:
- a barrier of the whole block orders everything (`block_floor`), one of some warps what these warps knew (`clock`);
- threads of one warp are ordered by `bar.warp.sync` and barriers alone (`warp_floor`): shuffles and matrix instructions
  order nothing;
- an mbarrier hands what arriving warps knew to those that see its phase end (`arrive`, `acquire`).

An actor is a thread, or (from `threads.count` on) a warp acting as one, or (after those) an agent of the asynchronous
proxy: see `async_proxy.py`. A warp's clock has a column for each warp of its cluster (its block, where there are none),
then one for each agent. No barrier orders what an agent does: a warp knows of it what it has waited for, or been told
by a warp that had. In a cluster a barrier of a block is one of some warps, for other blocks have access to its memory.
Last come columns for warps of other blocks: see `global_order.py`.

Clocks are kept for warps: what one thread learns, its warp knows, and what it hands on is what its warp has done.
"""

from __future__ import annotations

import numpy as np

from evoattn.ptx.program.arrays import Mask, Numbers
from evoattn.ptx.program.threads import WARP, Threads

SEVERAL = 63
"""Stands for more than one lane of a warp."""
ENDED = 1 << 40
"""Later than any time: the floor of a block whose threads have all exited."""


class HappensBefore:
    """Clocks of all warps of a machine."""

    def __init__(self, threads: Threads, agents: int = 0, foreign: int = 0) -> None:
        """`agents` of the asynchronous proxy in each cluster; `foreign` warps of the grid that it can be ordered
        with.
        """
        self.threads, self.agents, self.foreign = threads, agents, foreign
        self.first_agent = threads.count + threads.warp_count
        """Actors from here on are agents."""
        self.now = 1
        self.block_floor = np.zeros(threads.block_count, np.int64)
        self.warp_floor = np.zeros(threads.warp_count, np.int64)
        self.clock = np.zeros((threads.warp_count, threads.cluster_warps + agents + foreign), np.int64)
        """`[warp, column]`: what the warp knows of a warp or an agent of its cluster, then of every warp of the grid,
        up to then.
        """
        self._lane_clock: dict[int, Numbers] = {}  # of warps that synchronized in parts: [lane, other lane]
        self.warp_of = np.concatenate([threads.warp_of, np.arange(threads.warp_count)])
        self.lane_of = np.concatenate([threads.lane, np.full(threads.warp_count + agents, SEVERAL)])
        self.column_of = np.concatenate(
            [self.warp_of % threads.cluster_warps, threads.cluster_warps + np.arange(agents)]
        )

    def barrier(self, blocks: Numbers) -> None:
        """All threads of these blocks met."""
        if self.threads.cluster > 1:
            for block in blocks.tolist():
                self.barrier_of_warps(
                    np.arange(block * self.threads.block_warps, (block + 1) * self.threads.block_warps), []
                )
            return
        self.block_floor[blocks] = self.now
        self.warp_floor.reshape(self.threads.block_count, -1)[blocks] = self.now
        if self.agents or self.foreign:
            known = self.clock.reshape(self.threads.block_count, self.threads.block_warps, -1)[
                :, :, self.threads.block_warps :
            ]
            known[blocks] = known[blocks].max(1, keepdims=True)
        self.now += 1

    def retire(self, blocks: Numbers) -> None:
        """All threads of these blocks have exited, and of their clusters."""
        self.block_floor[blocks] = ENDED

    def arrive(self, warp: int) -> Numbers:
        """A warp signals a barrier without waiting: what it hands over, `[column]`."""
        known: Numbers = self.clock[warp].copy()
        known[warp % self.threads.cluster_warps] = self.now
        self.now += 1
        return known

    def acquire(self, warps: Numbers, known: Numbers) -> None:
        """These warps of one cluster learn what was handed over, `[column]`."""
        self.clock[warps] = np.maximum(self.clock[warps], known)

    def learn(self, warps: Numbers, agent: int, time: int) -> None:
        """These warps know of what an agent has done up to `time`."""
        column = self.threads.cluster_warps + agent
        self.clock[warps, column] = np.maximum(self.clock[warps, column], time)

    def barrier_of_warps(self, warps: Numbers, arrived: list[Numbers]) -> None:
        """Some warps of one block met; `arrived` is what others that only signalled handed over."""
        known = np.max([self.clock[warps].max(0), *arrived], axis=0)
        known[warps % self.threads.cluster_warps] = self.now
        self.clock[warps] = known
        self.warp_floor[warps] = self.now
        self.now += 1

    def warp_sync(self, warps: Numbers) -> None:
        """`bar.warp.sync` by all threads that are left of these warps."""
        self.warp_floor[warps] = self.now
        self.now += 1

    def warp_sync_in_parts(self, warps: Numbers, companions: Mask) -> None:
        """`bar.warp.sync` by threads of these warps; `companions` (bool `[len(warps), lane, lane]`) tells who
        synchronized with whom.
        """
        for warp, groups in zip(warps.tolist(), companions):
            clock = self._lane_clock.setdefault(warp, np.zeros((WARP, WARP), np.int64))
            for group in np.unique(groups[groups.any(1)], axis=0):
                known = clock[group].max(0)
                known[group] = self.now
                clock[group] = known
        self.now += 1

    def floor(self, actors: Numbers) -> Numbers | int:
        """Time up to which everything in an actor's block is ordered before it."""
        first = int(self.block_floor[0])
        if len(self.block_floor) == 1 or (self.block_floor == first).all():
            return first
        by_warp = np.repeat(self.block_floor, self.threads.block_warps)
        floors: Numbers = by_warp[self.warp_of[actors]]
        return floors

    def unordered(self, actors: Numbers, other_column: Numbers, other_lane: Numbers, time: Numbers) -> Mask:
        """Bool: which accesses, made by others of the actors' clusters at `time`, are not ordered before what the
        actors do now.

        The actors are threads and warps; the others are given by their column of the clock and their lane. An actor's
        own earlier accesses are ordered; a lane that is `SEVERAL` differs from every other, itself included. What is
        known from barriers of the block is `floor`'s matter.
        """
        warp, lane = self.warp_of[actors], self.lane_of[actors]
        result: Mask = time > self.clock[warp, other_column]
        same = warp % self.threads.cluster_warps == other_column
        result[same] = ((time > self.warp_floor[warp]) & ((lane != other_lane) | (lane == SEVERAL)))[same]
        if self._lane_clock:
            for i in np.flatnonzero(result & same):
                clock = self._lane_clock.get(int(warp[i]))
                if clock is not None:
                    rows = clock if lane[i] == SEVERAL else clock[lane[i]]
                    known = rows.max() if other_lane[i] == SEVERAL else rows[..., other_lane[i]].min()
                    result[i] = time[i] > known
        return result
