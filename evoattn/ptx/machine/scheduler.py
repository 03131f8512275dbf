"""Runs prepared instructions: all threads together while they agree, the group with the lowest pc first when they do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from evoattn.ptx.errors import Deadlock, DivergentCollective, StepLimitExceeded, Trapped
from evoattn.ptx.isa.cluster_barrier import ClusterArrival, ClusterBarriers, ClusterWait
from evoattn.ptx.isa.control import BarrierArrival, Branch, Exit
from evoattn.ptx.isa.flow import Flow, ends_run
from evoattn.ptx.machine.barriers import Barriers
from evoattn.ptx.program.dtypes import parse_type
from evoattn.ptx.program.threads import ActiveThreads
from evoattn.ptx.state.context import Context, NotConverged
from evoattn.ptx.state.mbarriers import PhaseWait, mbarriers_of

_RUN_COST = 4
"""Steps that a run counts beside its instructions: what entering it takes, so that the limit bounds time for short loops too."""

Step = tuple[Callable, bool]
"""A callable, and whether it takes the active threads."""


@dataclass
class _Run:
    """A straight run of instructions, `start` ≤ pc < `end`, and what ends it (None if the run goes on into the next)."""

    start: int
    end: int
    together: list[Callable[[], None]]
    """For all threads at once."""
    apart: dict[frozenset[int], list[Step]]
    """For a part of the threads, by the pcs at which the others wait."""


MAX_POLLS_IN_VAIN = 1000
"""Runs of polling loops, one after another with no other in between, after which they are taken to be for ever."""


class Scheduler:
    """One execution of a kernel by the threads of a context. `executions(pc)` counts warps."""

    def __init__(self, context: Context, flow: Flow, step_limit: int) -> None:
        self.context, self.flow, self.step_limit = context, flow, step_limit
        self.steps = 0
        self.instructions = context.kernel.instructions
        self._everyone = ActiveThreads(context.threads, None)
        self._operations = [self._prepare(i) for i in range(flow.count)]
        self._runs: dict[int, _Run] = {}
        self._entered = np.zeros(flow.count + 1, np.int64)
        self._barriers = Barriers(context)
        self._clusters = ClusterBarriers(context)
        self._phases = mbarriers_of(context)
        self._ready: dict[int, ActiveThreads] = {}
        self._stalled: dict[int, np.ndarray] = {}
        self._interned: dict[bytes, ActiveThreads] = {}
        self._predicates: dict[int, Callable[[], np.ndarray] | None] = {}
        self._polls_in_vain = 0

    # ---- preparation

    def _prepare(self, pc: int):
        entry, fields = self.flow.entries[pc]
        return entry.prepare(self.context, self.instructions[pc], fields)

    def _predicate(self, pc: int) -> Callable[[], np.ndarray] | None:
        predicate = self.instructions[pc].predicate
        if predicate is None:
            return None
        array = self.context.source(predicate[0], parse_type("pred"))
        return (lambda: ~array) if predicate[1] else (lambda: array)

    def _masked(self, pc: int) -> Callable[[ActiveThreads], None]:
        """A pure operation that changes the registers of active threads only."""
        operation = self._operations[pc]
        targets = [self.context.register(name) for name in self.flow.written[pc]]

        def run(active: ActiveThreads) -> None:
            if active.mask is None:
                operation()
                return
            before = [target.copy() for target in targets]
            operation()
            for target, old in zip(targets, before):
                np.copyto(target, old, where=active.inactive)

        return run

    def _step(self, pc: int, keep_others: bool) -> Step:
        """The instruction at `pc`; `keep_others` if registers that it writes are wanted by threads that wait elsewhere."""
        pure = self.flow.entries[pc][0].pure
        predicate = self._predicate(pc)
        if pure and predicate is None and not keep_others:
            return self._operations[pc], False
        operation = self._masked(pc) if pure else self._operations[pc]
        if predicate is None:
            return operation, True

        def run(active: ActiveThreads) -> None:
            chosen = active.where(predicate())
            if chosen is not None:
                operation(chosen)

        return run, True

    def _run_from(self, pc: int) -> _Run:
        run = self._runs.get(pc)
        if run is None:
            end = self.flow.end_of_run(pc)
            steps = [self._step(i, False) for i in range(pc, end)]
            together = [partial(f, self._everyone) if takes else f for f, takes in steps]
            run = self._runs[pc] = _Run(pc, end, together, {})
        return run

    def _steps_apart(self, run: _Run) -> list[Step]:
        at_barriers = (*self._barriers.waiting_at, *self._clusters.waiting_at, *self._phases.waiting_at)
        waiting = frozenset((*self._ready, *self._stalled, *at_barriers))
        steps = run.apart.get(waiting)
        if steps is None:
            wanted = 0
            for pc in waiting:
                wanted |= self.flow.live(pc)
            steps = [
                self._step(i, bool(self.flow.bits(self.flow.written[i]) & wanted)) for i in range(run.start, run.end)
            ]
            run.apart[waiting] = steps
        return steps

    # ---- execution

    def run(self) -> None:
        """Run to the end. Raises a `PtxError` on the first fault that stops execution."""
        with np.errstate(all="ignore"):
            pc, active = 0, self._intern(self.context.alive)
            while True:
                following = self._execute(pc, active)
                if self._phases.woken:
                    following += self._interned_groups(self._phases.woken)
                    self._phases.woken = []
                if (
                    len(following) == 1
                    and not self._ready
                    and following[0][1] is active
                    and following[0][0] not in self._stalled
                ):
                    pc = following[0][0]
                    self._count_polls(pc)
                    continue
                for next_pc, threads in following:
                    self._make_ready(next_pc, threads)
                if not self._ready:
                    for next_pc, threads in self._interned_groups(self._phases.give_up()):
                        self._make_ready(next_pc, threads)
                if not self._ready:
                    self._finish()
                    return
                pc = min(self._ready, key=self._turn)
                active = self._ready.pop(pc)
                self._count_polls(pc)

    def _turn(self, pc: int) -> tuple[bool, int]:
        """Who goes first: those furthest behind, so that threads meet again; last those who poll memory that others have yet to write."""
        return pc in self.flow.polls, pc

    def _count_polls(self, pc: int) -> None:
        """Raises `Deadlock` when all who are left have polled in vain."""
        self._polls_in_vain = self._polls_in_vain + 1 if pc in self.flow.polls else 0
        if self._polls_in_vain > MAX_POLLS_IN_VAIN:
            raise Deadlock(
                f"{self.context.kernel.name} is deadlocked: threads poll from {self.instructions[pc]} on, and all others wait or have "
                "ended."
            )

    def _execute(self, pc: int, active: ActiveThreads) -> list[tuple[int, ActiveThreads]]:
        """Run from `pc` to what ends the run; returns who goes on where."""
        if pc >= self.flow.count:
            return self._exit(active)
        run = self._run_from(pc)
        self.steps += run.end - pc + _RUN_COST
        if self.steps > self.step_limit:
            raise StepLimitExceeded(
                f"{self.context.kernel.name} was stopped after {self.step_limit} instructions, at {self.instructions[pc]}: "
                "it may never end."
            )
        for told in self.context.before_run:
            told(pc, run.end, active)
        warps = active.warp_count
        self._entered[pc] += warps
        if active.mask is None:
            for operation in run.together:
                operation()
        else:
            try:
                for operation, takes in self._steps_apart(run):
                    if takes:
                        operation(active)
                    else:
                        operation()
            except NotConverged as stop:
                self._entered[stop.ins.index] -= warps
                return self._stall(stop, active)
        end = run.end
        if end >= self.flow.count or not ends_run(self.instructions[end]):
            self._entered[end] -= warps
            return [(end, active)]
        self._entered[end + 1] -= warps
        return self._end_run(end, active)

    def _end_run(self, pc: int, active: ActiveThreads) -> list[tuple[int, ActiveThreads]]:
        """The instruction that ends a run."""
        ending = self._operations[pc]
        predicate = self._predicate_at(pc)
        if predicate is None:
            acting, rest = active, None
        else:
            acting, rest = self._split(active, predicate())
        following = [] if rest is None else [(pc + 1, rest)]
        if acting is None:
            return following
        if isinstance(ending, Branch):
            return [*following, (self._targets(pc), acting)]
        if isinstance(ending, Exit):
            return [*following, *self._exit(acting)]
        if isinstance(ending, BarrierArrival):
            if self._barriers.passes_at_once(ending, acting):
                return [*following, (pc + 1, acting)]
            return [*following, *self._interned_groups(self._barriers.arrive(ending, acting, pc + 1))]
        if isinstance(ending, ClusterArrival):
            return [*following, (pc + 1, acting), *self._interned_groups(self._clusters.arrive(ending, acting))]
        if isinstance(ending, ClusterWait):
            return [*following, *self._interned_groups(self._clusters.wait(ending, acting, pc + 1))]
        if isinstance(ending, PhaseWait):
            passing = self._phases.wait(ending, acting, pc + 1)
            if passing is None:
                return [*following, (pc + 1, acting)]
            return [*following, *([(pc + 1, self._intern(passing))] if passing.any() else [])]
        raise Trapped(f"{self.context.threads.describe(acting.index[0])} executed {self.instructions[pc]}.")

    def _predicate_at(self, pc: int):
        if pc not in self._predicates:
            self._predicates[pc] = self._predicate(pc)
        return self._predicates[pc]

    def _targets(self, pc: int) -> int:
        return self.flow.target(self.instructions[pc])

    def _split(self, active: ActiveThreads, predicate: np.ndarray) -> tuple[ActiveThreads | None, ActiveThreads | None]:
        """Those for which the predicate holds, and the rest; None for nobody."""
        mask = predicate if active.mask is None else active.mask & predicate
        count = np.count_nonzero(mask)
        if count == 0:
            return None, active
        if count == len(active):
            return active, None
        return self._intern(mask), self._intern(active.full_mask & ~mask)

    def _intern(self, mask: np.ndarray) -> ActiveThreads:
        """The same object for the same mask, so that what it derives is derived once."""
        key = mask.tobytes()
        found = self._interned.get(key)
        if found is None:
            if len(self._interned) > 4096:
                self._interned.clear()
            found = self._interned[key] = (
                self._everyone if mask.all() else ActiveThreads(self.context.threads, mask.copy())
            )
        return found

    def _interned_groups(self, groups: list[tuple[int, np.ndarray]]) -> list[tuple[int, ActiveThreads]]:
        return [(pc, self._intern(mask)) for pc, mask in groups]

    def _make_ready(self, pc: int, threads: ActiveThreads) -> None:
        """Add a group, joined with those that are ready or stalled at the same pc."""
        joined = threads.full_mask
        if pc in self._ready:
            joined = joined | self._ready[pc].full_mask
        if pc in self._stalled:
            joined = joined | self._stalled.pop(pc)
        self._ready[pc] = threads if joined is threads.full_mask else self._intern(joined)

    def _stall(self, stop: NotConverged, active: ActiveThreads) -> list[tuple[int, ActiveThreads]]:
        """Threads of incomplete warps wait for the rest of their warp; the whole warps go on."""
        pc = stop.ins.index
        others = active.full_mask & ~stop.partial
        if pc in self._stalled or pc in self._ready:
            return [(pc, active)]  # joins those, and then all try again
        self._stalled[pc] = stop.partial
        return (
            self._execute(pc, self._intern(others)) if others.any() else []
        )  # at once: a ready group would join those that stall

    def _exit(self, active: ActiveThreads) -> list[tuple[int, ActiveThreads]]:
        """Remove threads; barriers and warp-wide instructions no longer wait for them."""
        for told in self.context.at_exit:
            told(active)
        self.context.alive &= active.inactive
        self.context.alive_version += 1
        if self.context.races is not None:
            blocks = self.context.alive.reshape(self.context.threads.block_count, -1)
            ended = np.flatnonzero(~blocks.any(1))
            if self.context.async_races is not None:
                self.context.async_races.retire(ended)
            self.context.remote.retire(ended)
            size = self.context.threads.cluster
            self.context.races.retire(np.flatnonzero(np.repeat(~blocks.any(1).reshape(-1, size).any(1), size)))
        following = self._interned_groups(self._barriers.release() + self._clusters.release())
        following += self._interned_groups(list(self._stalled.items()))
        self._stalled.clear()
        return following

    def _finish(self) -> None:
        """Nobody can go on: either all have exited, or they wait for ever."""
        if self._stalled and not self._phases.waiting_at:
            pc, mask = min(self._stalled.items())
            first = int(np.flatnonzero(mask)[0])
            raise DivergentCollective(
                f"{self.context.threads.describe(first)} waits for ever at {self.instructions[pc]}, which a part of its warp or warpgroup "
                "never reaches."
            )
        at_barriers = sorted([*self._barriers.waiting_at.items(), *self._clusters.waiting_at.items()])
        waiting = [(self.instructions[pc - 1], mask) for pc, mask in at_barriers]
        waiting += [(self.instructions[pc], mask) for pc, mask in sorted(self._stalled.items())]
        places = [f"{np.count_nonzero(mask)} threads at {ins}" for ins, mask in waiting] + self._phases.describe_waits()
        if places:
            raise Deadlock(
                f"{self.context.kernel.name} is deadlocked: all threads that are left wait, " + "; ".join(places) + "."
            )
        if self.context.races is not None:
            self.context.races.check()

    def executions(self) -> np.ndarray:
        """How many warps executed each instruction."""
        return np.cumsum(self._entered)[:-1]
