"""Which accesses happened before which: vector clocks over the synchronizations of threads.

Time is one counter, `now`, that moves at every synchronization. An access at one time is ordered before another at a
later time if a synchronization between the two, in which both their warps took part, carries it over:
- a barrier of the whole block orders everything (`block_floor`), one of some warps what these warps knew (`clock`);
- threads of one warp are ordered by `bar.warp.sync` and barriers alone (`warp_floor`): shuffles and matrix instructions
  order nothing;
- an mbarrier hands what arriving threads knew to those that see its phase end (`arrive`, `acquire`).

An actor is a thread, or (from `threads.count` on) a warp acting as one, or (after those) an agent of the asynchronous
proxy: see `async_proxy.py`. A warp's clock has a column for each warp of its cluster (its block, where there are none),
then one for each agent. No barrier orders what an agent does: a warp knows of it what it has waited for, or been told
by a warp that had. In a cluster a barrier of a block is one of some warps, for other blocks have access to its memory.
Last come columns for warps of other blocks: see `global_order.py`.

Clocks are kept for warps. What a thread learns alone (a part of its warp waited) is kept apart until its warp meets at
`bar.warp.sync` or a barrier, and what it hands on alone is its own accesses, and those of its warp up to that meeting.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from evoattn.ptx.program.kernel import Mask, Numbers
from evoattn.ptx.program.threads import WARP, Threads


@dataclass
class Knowledge:
    """Columns are those of `HappensBefore.clock`."""

    known: Numbers
    """`[column]`: all that every lane of that warp, or that agent, has done up to then."""
    lanes: dict[tuple[int, int], int] = field(default_factory=dict)
    """By column and lane: what that lane alone has done, up to a later time."""

    @classmethod
    def of_nothing(cls, columns: int) -> Knowledge:
        """Of nobody's accesses, for that many columns."""
        return cls(np.zeros(columns, np.int64))

    def join(self, other: Knowledge) -> None:
        """Learn what another knows."""
        np.maximum(self.known, other.known, out=self.known)
        join_lanes(self.lanes, other.lanes)

    def covers(self, column: int, lane: int, time: int) -> bool:
        """Whether it holds what a lane of a column did at a time."""
        return bool(time <= self.known[column]) or time <= self.lanes.get((column, lane), 0)

    def tells_of(self, column: int, time: int) -> bool:
        """Whether it holds what some thread of a column did at a time."""
        return bool(time <= self.known[column]) or any(
            time <= at for (other, _), at in self.lanes.items() if other == column
        )


def join_lanes(lanes: dict[tuple[int, int], int], others: dict[tuple[int, int], int]) -> None:
    """The later of both for each lane, into `lanes`."""
    for key, time in others.items():
        if time > lanes.get(key, 0):
            lanes[key] = time


SEVERAL = 63
"""Stands for more than one lane of a warp."""
ENDED = 1 << 40
"""Later than any time: the floor of a block whose threads have all exited."""


class HappensBefore:
    """Clocks of all warps of a machine."""

    def __init__(self, threads: Threads, agents: int = 0, foreign: int = 0) -> None:
        """`agents` of the asynchronous proxy in each cluster; `foreign` warps of the grid that it can be ordered
        with."""
        self.threads, self.agents, self.foreign = threads, agents, foreign
        self.first_agent = threads.count + threads.warp_count
        """Actors from here on are agents."""
        self.now = 1
        self.block_floor = np.zeros(threads.block_count, np.int64)
        self.warp_floor = np.zeros(threads.warp_count, np.int64)
        self.clock = np.zeros((threads.warp_count, threads.cluster_warps + agents + foreign), np.int64)
        """`[warp, column]`: what the warp knows of a warp or an agent of its cluster, then of every warp of the grid,
        up to then."""
        self._lane_clock: dict[int, Numbers] = {}  # of warps that synchronized in parts: [lane, other lane]
        self._of_warps: dict[int, dict[tuple[int, int], int]] = {}  # by warp: lanes of others that all its lanes know
        self._of_lanes: dict[int, dict[int, Knowledge]] = {}  # by warp and lane: what it learned alone
        self.warp_of = np.concatenate([threads.warp_of, np.arange(threads.warp_count)])
        self._block_of = self.warp_of // threads.block_warps
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
        if self._of_lanes or self._of_warps:
            for block in blocks.tolist():
                self._gather(np.arange(block * self.threads.block_warps, (block + 1) * self.threads.block_warps))
        if self.agents or self.foreign:
            known = self.clock.reshape(self.threads.block_count, self.threads.block_warps, -1)[
                :, :, self.threads.block_warps :
            ]
            known[blocks] = known[blocks].max(1, keepdims=True)
        self.now += 1

    def retire(self, blocks: Numbers) -> None:
        """All threads of these blocks have exited, and of their clusters."""
        self.block_floor[blocks] = ENDED

    def arrive(self, warp: int, lane: int | None = None) -> Knowledge:
        """A warp, or a lane of it alone, signals a barrier without waiting: what it hands over."""
        column, alone = warp % self.threads.cluster_warps, self._of_lanes.get(warp, {})
        result = Knowledge(self.clock[warp].copy(), dict(self._of_warps.get(warp, {})))
        for of, knowledge in alone.items():
            if lane in (None, of):
                result.join(knowledge)
        if lane is None:
            result.known[column] = self.now
        else:
            result.known[column] = max(int(result.known[column]), int(self.warp_floor[warp]))
            if warp in self._lane_clock:
                times = self._lane_clock[warp][lane].tolist()
                join_lanes(result.lanes, {(column, other): time for other, time in enumerate(times)})
            result.lanes[column, lane] = self.now
        self.now += 1
        return result

    def acquire(self, warps: Numbers, knowledge: Knowledge) -> None:
        """These whole warps of one cluster learn what was handed over."""
        self.clock[warps] = np.maximum(self.clock[warps], knowledge.known)
        if knowledge.lanes:
            for warp in warps.tolist():
                join_lanes(self._of_warps.setdefault(warp, {}), knowledge.lanes)

    def acquire_by_lanes(self, warp: int, lanes: Mask, left: Mask, knowledge: Knowledge) -> None:
        """These lanes of a warp, of those that are `left` (both bool `[32]`), learn what was handed over."""
        alone = self._of_lanes.setdefault(warp, {})
        for lane in np.flatnonzero(lanes).tolist():
            alone.setdefault(lane, Knowledge.of_nothing(self.clock.shape[1])).join(knowledge)
        if all(lane in alone for lane in np.flatnonzero(left).tolist()):
            common = np.minimum.reduce([alone[lane].known for lane in np.flatnonzero(left).tolist()])
            np.maximum(self.clock[warp], common, out=self.clock[warp])

    def learn(self, warps: Numbers, agent: int, time: int) -> None:
        """These warps know of what an agent has done up to `time`."""
        column = self.threads.cluster_warps + agent
        self.clock[warps, column] = np.maximum(self.clock[warps, column], time)

    def learn_alone(self, thread: int, left: Mask, agent: int, time: int) -> None:
        """As `learn`, of one thread; `left` (bool `[32]`) are the lanes of its warp that have not exited."""
        warp, lane = divmod(thread, WARP)
        knowledge = Knowledge.of_nothing(self.clock.shape[1])
        knowledge.known[self.threads.cluster_warps + agent] = time
        self.acquire_by_lanes(warp, np.arange(WARP) == lane, left, knowledge)

    def known_by_any(self, warps: Numbers, column: int) -> int:
        """Up to when some thread of these warps knows what a column has done."""
        alone = (k.known[column] for w in warps.tolist() for k in self._of_lanes.get(w, {}).values())
        return int(max([self.clock[warps, column].max(), *alone]))

    def known_to(self, actor: int) -> Knowledge:
        """All that a thread, or a warp acting as one, knows of other warps and of agents, but for `block_floor`."""
        warp, lane = int(self.warp_of[actor]), int(self.lane_of[actor])
        result = Knowledge(self.clock[warp].copy(), dict(self._of_warps.get(warp, {})))
        if lane in self._of_lanes.get(warp, {}):
            result.join(self._of_lanes[warp][lane])
        return result

    def _gather(self, warps: Numbers) -> Knowledge:
        """What all threads of these warps know together; none of them knows it alone any more."""
        result = Knowledge(self.clock[warps].max(0))
        for warp in warps.tolist():
            join_lanes(result.lanes, self._of_warps.get(warp, {}))
            for knowledge in self._of_lanes.pop(warp, {}).values():
                result.join(knowledge)
        self.clock[warps, self.threads.cluster_warps :] = result.known[self.threads.cluster_warps :]
        return result

    def barrier_of_warps(self, warps: Numbers, arrived: list[Knowledge]) -> None:
        """Some warps of one block met; `arrived` is what others that only signalled handed over."""
        result = self._gather(warps)
        for knowledge in arrived:
            result.join(knowledge)
        result.known[warps % self.threads.cluster_warps] = self.now
        self.clock[warps] = result.known
        if result.lanes:
            for warp in warps.tolist():
                self._of_warps[warp] = dict(result.lanes)
        self.warp_floor[warps] = self.now
        self.now += 1

    def warp_sync(self, warps: Numbers) -> None:
        """`bar.warp.sync` by all threads that are left of these warps."""
        if self._of_lanes:
            for warp in warps.tolist():
                for knowledge in self._of_lanes.pop(warp, {}).values():
                    self.acquire(np.array([warp]), knowledge)
        self.warp_floor[warps] = self.now
        self.now += 1

    def warp_sync_in_parts(self, warps: Numbers, companions: Mask) -> None:
        """`bar.warp.sync` by threads of these warps; `companions` (bool `[len(warps), lane, lane]`) tells who
        synchronized with whom."""
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
        if len(self.block_floor) == 1 or not np.count_nonzero(self.block_floor != first):
            return first
        floors: Numbers = self.block_floor[self._block_of[actors]]
        return floors

    def unordered(self, actors: Numbers, other_column: Numbers, other_lane: Numbers, time: Numbers) -> Mask:
        """Bool: which accesses, made by others of the actors' clusters at `time`, are not ordered before what the
        actors do now.

        The actors are threads and warps; the others are given by their column of the clock and their lane. An actor's
        own earlier accesses are ordered; a lane that is `SEVERAL` differs from every other, itself included. What is
        known from barriers of the block is `floor`'s matter."""
        warp, lane = self.warp_of[actors], self.lane_of[actors]
        result: Mask = time > self.clock[warp, other_column]
        same = warp % self.threads.cluster_warps == other_column
        result[same] = ((time > self.warp_floor[warp]) & ((lane != other_lane) | (lane == SEVERAL)))[same]
        if not np.count_nonzero(result):  # most are ordered
            return result
        if self._lane_clock:
            for i in np.flatnonzero(result & same):
                clock = self._lane_clock.get(int(warp[i]))
                if clock is not None:
                    rows = clock if lane[i] == SEVERAL else clock[lane[i]]
                    known = rows.max() if other_lane[i] == SEVERAL else rows[..., other_lane[i]].min()
                    result[i] = time[i] > known
        if self._of_warps or self._of_lanes:
            for i in np.flatnonzero(result & ~same):
                result[i] = not self._knows(int(warp[i]), int(lane[i]), int(other_column[i]), other_lane[i], time[i])
        return result

    def _knows(self, warp: int, lane: int, column: int, other_lane: int, time: int) -> bool:
        """As `unordered`, of what lanes know apart from their warp, or warps of lanes."""
        if time <= self._of_warps.get(warp, {}).get((column, other_lane), 0):
            return True
        alone = self._of_lanes.get(warp, {}).get(lane)
        return alone is not None and alone.covers(column, other_lane, time)
