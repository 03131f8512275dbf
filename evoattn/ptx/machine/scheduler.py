"""Runs prepared instructions: all threads together while they agree, else the group with the lowest pc first."""

from collections.abc import Iterator

import numpy as np

from evoattn.ptx.errors import Deadlock, DivergentCollective, StepLimitExceeded, Trapped
from evoattn.ptx.isa.cluster_barrier import ClusterArrival, ClusterBarriers, ClusterWait
from evoattn.ptx.isa.control import BarrierArrival, Branch, Exit, Flow, ends_run
from evoattn.ptx.machine.barriers import Barriers
from evoattn.ptx.machine.runs import Runs
from evoattn.ptx.program.kernel import Instruction, Mask, Numbers
from evoattn.ptx.program.threads import ActiveThreads
from evoattn.ptx.state.context import Context, NotConverged
from evoattn.ptx.state.phase_waits import PhaseWait, PhaseWaits

MAX_POLLS_IN_VAIN = 1000
"""Runs of polling loops, one after another with no other in between, after which they are taken to be endless."""
LATE_POLLS, LATE_COUNTED_POLLS = 10, 5000
"""The same, after which late blocks begin; the second of loops that count, which are to give up first
(`templates/flash_wgmma/sum_parts.cuh` looks 4,096 times)."""


def _hands_over(ins: Instruction) -> bool:
    """Whether it may tell other clusters something: atomics on shared memory do not."""
    return ins.opcode.split(".")[0] in ("atom", "red") and ".shared" not in ins.opcode


class Polls:
    """What one execution has polled in vain, and who has yet to begin."""

    def __init__(self, context: Context, flow: Flow, late: bool) -> None:
        """`late`: of the clusters of a kernel that hands something over between blocks every third one begins last."""
        self.context, self.flow = context, flow
        self._in_vain = 0
        threads = context.threads
        self._late: Mask | None = None
        if late and threads.block_count > threads.cluster and any(map(_hands_over, context.kernel.instructions)):
            self._late = context.alive & (threads.block_of // threads.cluster % 3 == 0)

    def first(self) -> Mask:
        """Who begins at once."""
        return self.context.alive if self._late is None else self.context.alive & ~self._late

    def begin(self) -> list[tuple[int, Mask]]:
        """The late blocks and the pc at which they begin, as nobody else can go on; empty if they have begun."""
        late, self._late, self._in_vain = self._late, None, 0
        return [] if late is None else [(0, late)]

    def count(self, pc: int) -> list[tuple[int, Mask]]:
        """Told of each run, returns the late blocks when the others have polled for long. Raises `Deadlock` when all
        who are left have polled in vain."""
        self._in_vain = self._in_vain + 1 if pc in self.flow.polls else 0
        if self._late is not None:
            return self.begin() if self._in_vain > self._patience(pc) else []
        if self._in_vain > MAX_POLLS_IN_VAIN:
            raise Deadlock(
                f"{self.context.kernel.name} is deadlocked: threads poll from {self.context.kernel.instructions[pc]} "
                "on, and all others wait or have ended."
            )
        return []

    def _patience(self, pc: int) -> int:
        if pc not in self.flow.polls:
            return LATE_POLLS
        loop = self.context.kernel.instructions[pc : self.flow.end_of_run(pc)]
        return LATE_COUNTED_POLLS if any(ins.opcode.startswith(("add.", "sub.")) for ins in loop) else LATE_POLLS


_RUN_COST = 4
"""Steps that a run counts beside its instructions: what entering it takes, so that the limit bounds time for short
loops too."""

Groups = list[tuple[int, ActiveThreads]]
"""Who goes on at which pc."""


class Scheduler:
    """One execution of a kernel by the threads of a context. `executions(pc)` counts warps."""

    def __init__(self, context: Context, flow: Flow, step_limit: int, late_blocks: bool = False) -> None:
        self.context, self.flow, self.step_limit = context, flow, step_limit
        self.steps = 0
        self.instructions = context.kernel.instructions
        self._everyone = ActiveThreads(context.threads, None)
        self._runs = Runs(context, flow)
        self._entered = np.zeros(flow.count + 1, np.int64)
        self._barriers = Barriers(context)
        self._clusters = ClusterBarriers(context)
        self._phases = PhaseWaits(context)
        self._ready: dict[int, ActiveThreads] = {}
        self._stalled: dict[int, Mask] = {}
        self._interned: dict[bytes, ActiveThreads] = {}
        self._polls = Polls(context, flow, late_blocks)
        self._polled: dict[int, int] = {}

    def run(self) -> None:
        """Run to the end. Raises a `PtxError` on the first fault that stops execution."""
        with np.errstate(all="ignore"):
            pc, active = 0, self._intern(self._polls.first())
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
                    for next_pc, threads in self._interned_groups(self._polls.begin() or self._phases.give_up()):
                        self._make_ready(next_pc, threads)
                if not self._ready:
                    self._finish()
                    return
                pc = min(self._ready, key=self._turn)
                active = self._ready.pop(pc)
                if pc in self.flow.polls:
                    self._polled[pc] = self.steps
                self._count_polls(pc)

    def _turn(self, pc: int) -> tuple[bool, int]:
        """Who goes first: those furthest behind, so that threads meet again; last those who poll memory that others
        have yet to write, of several loops the one that polled longest ago."""
        return (True, self._polled.get(pc, 0)) if pc in self.flow.polls else (False, pc)

    def _count_polls(self, pc: int) -> None:
        """Raises `Deadlock` when all who are left have polled in vain."""
        for first_pc, threads in self._interned_groups(self._polls.count(pc)):
            self._make_ready(first_pc, threads)

    def _execute(self, pc: int, active: ActiveThreads) -> Groups:
        """Run from `pc` to what ends the run; returns who goes on where."""
        if pc >= self.flow.count:
            return self._exit(active)
        run = self._runs.run_from(pc)
        self.steps += run.end - pc + _RUN_COST
        if self.steps > self.step_limit:
            raise StepLimitExceeded(
                f"{self.context.kernel.name} was stopped after {self.step_limit} instructions, at "
                f"{self.instructions[pc]}: it may never end."
            )
        for told in self.context.before_run:
            told(pc, run.end, active)
        warps = active.warp_count
        self._entered[pc] += warps
        if active.mask is None:
            for operation in self._runs.steps_together(run):
                operation()
        else:
            if run.acts:
                self.context.go_apart(active)
            try:
                for step in self._runs.steps_apart(run, self._waiting_pcs()):
                    step(active)
            except NotConverged as stop:
                self._entered[stop.ins.index] -= warps
                return self._stall(stop, active)
        end = run.end
        if end >= self.flow.count or not ends_run(self.instructions[end]):
            self._entered[end] -= warps
            return [(end, active)]
        self._entered[end + 1] -= warps
        return self._end_run(end, active)

    def _waiting_pcs(self) -> Iterator[int]:
        """Where others are to go on."""
        yield from self._ready
        yield from self._stalled
        yield from self._barriers.waiting_at
        yield from self._clusters.waiting_at
        yield from self._phases.waiting_at

    def _end_run(self, pc: int, active: ActiveThreads) -> Groups:
        """The instruction that ends a run."""
        ending, predicate = self._runs.ending(pc), self._runs.predicate(pc)
        acting, rest = (active, None) if predicate is None else self._split(active, predicate)
        following: Groups = [] if rest is None else [(pc + 1, rest)]
        if acting is None:
            return following
        if isinstance(ending, Branch):
            return [*following, (self.flow.target(self.instructions[pc]), acting)]
        if isinstance(ending, Exit):
            return [*following, *self._exit(acting)]
        if isinstance(ending, BarrierArrival):
            if self._barriers.passes_at_once(ending, acting):
                return [*following, (pc + 1, acting)]
            return [*following, *self._interned_groups(self._barriers.arrive(ending, acting, pc + 1))]
        if isinstance(ending, ClusterArrival | ClusterWait) and ".aligned" in ending.ins.opcode:
            try:
                self.context.require_every_lane(acting, ending.ins)
            except NotConverged as stop:
                self._entered[pc : pc + 2] += -acting.warp_count, acting.warp_count
                return [*following, *self._stall(stop, acting)]
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

    def _split(self, active: ActiveThreads, predicate: Mask) -> tuple[ActiveThreads | None, ActiveThreads | None]:
        """Those for which the predicate holds, and the rest; None for nobody."""
        mask = predicate if active.mask is None else active.mask & predicate
        count = np.count_nonzero(mask)
        if count == 0:
            return None, active
        if count == len(active):
            return active, None
        return self._intern(mask), self._intern(active.full_mask & ~mask)

    def _intern(self, mask: Mask) -> ActiveThreads:
        """The same object for the same mask, so that what it derives is derived once."""
        key = mask.tobytes()
        found = self._interned.get(key)
        if found is None:
            if len(self._interned) > 4096:
                self._interned.clear()
            made = self._everyone if mask.all() else ActiveThreads(self.context.threads, mask.copy())
            found = self._interned[key] = made
        return found

    def _interned_groups(self, groups: list[tuple[int, Mask]]) -> Groups:
        return [(pc, self._intern(mask)) for pc, mask in groups]

    def _make_ready(self, pc: int, threads: ActiveThreads) -> None:
        """Add a group, joined with those that are ready or stalled at the same pc."""
        joined = threads.full_mask
        if pc in self._ready:
            joined = joined | self._ready[pc].full_mask
        if pc in self._stalled:
            joined = joined | self._stalled.pop(pc)
        self._ready[pc] = threads if joined is threads.full_mask else self._intern(joined)

    def _stall(self, stop: NotConverged, active: ActiveThreads) -> Groups:
        """Threads of incomplete warps wait for the rest of their warp; the whole warps go on."""
        pc = stop.ins.index
        others = active.full_mask & ~stop.partial
        if pc in self._stalled or pc in self._ready:
            return [(pc, active)]  # joins those, and then all try again
        self._stalled[pc] = stop.partial
        # At once: a ready group would join those that stall.
        return self._execute(pc, self._intern(others)) if others.any() else []

    def _exit(self, active: ActiveThreads) -> Groups:
        """Remove threads; barriers and warp-wide instructions no longer wait for them."""
        for told in self.context.at_exit:
            told(active)
        self.context.leave(active)
        if self.context.races is not None:
            blocks = self.context.alive.reshape(self.context.threads.block_count, -1)
            ended = np.flatnonzero(~blocks.any(1))
            self.context.races.proxy.retire(ended)
            self.context.remote.retire(ended)
            size = self.context.threads.cluster
            self.context.races.shared.retire(np.flatnonzero(np.repeat(~blocks.any(1).reshape(-1, size).any(1), size)))
        following = self._interned_groups(self._barriers.release() + self._clusters.release())
        following += self._interned_groups(list(self._stalled.items()))
        self._stalled.clear()
        return following

    def _finish(self) -> None:
        """Nobody can go on: either all have exited, or they wait forever."""
        if self._stalled and not self._phases.waiting_at:
            pc, mask = min(self._stalled.items())
            raise DivergentCollective(
                f"{self.context.threads.describe(int(mask.argmax()))} waits forever at {self.instructions[pc]}, "
                "which a part of its warp or warpgroup never reaches."
            )
        at_barriers = sorted([*self._barriers.waiting_at.items(), *self._clusters.waiting_at.items()])
        waiting = [(self.instructions[pc - 1], mask) for pc, mask in at_barriers]
        waiting += [(self.instructions[pc], mask) for pc, mask in sorted(self._stalled.items())]
        places = [f"{np.count_nonzero(mask)} threads at {ins}" for ins, mask in waiting] + self._phases.describe()
        if places:
            raise Deadlock(
                f"{self.context.kernel.name} is deadlocked: all threads that are left wait, " + "; ".join(places) + "."
            )
        if self.context.races is not None:
            self.context.races.shared.check()

    def executions(self) -> Numbers:
        """How many warps executed each instruction."""
        return np.cumsum(self._entered)[:-1]
