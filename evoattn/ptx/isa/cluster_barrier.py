"""barrier.cluster (sm_90): the barrier of all threads of a cluster, in two halves.

A phase is complete when every thread of the cluster that is left has arrived; only then do those that wait go on. What
the arriving warps knew passes to those that wait, except from `arrive.relaxed`: it tells of mbarrier initializations
alone that its own thread has fenced for the cluster (PTX ISA, barrier.cluster and fence.mbarrier_init)."""

from dataclasses import dataclass

import numpy as np

from evoattn.ptx.errors import AsyncFault
from evoattn.ptx.isa.dispatch import Fields, instruction
from evoattn.ptx.program.arrays import Lanes, Mask
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.knowledge import Knowledge
from evoattn.ptx.state.context import Context
from evoattn.ptx.state.ending import Ending
from evoattn.ptx.state.mbarriers import mbarriers_of

_IDLE, _ARRIVED, _COMPLETE = 0, 1, 2


@dataclass(frozen=True)
class ClusterArrival(Ending):
    """Signals and goes on; a `relaxed` one orders no memory."""

    ins: Instruction
    relaxed: bool


@dataclass(frozen=True)
class ClusterWait(Ending):
    """Goes on when the phase that its thread arrived at is complete."""

    ins: Instruction


class ClusterBarriers:
    """The barriers of all clusters of a machine. `waiting_at` maps the pc after a wait to the threads that will go on
    there."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.waiting_at: dict[int, Lanes] = {}
        self._state = np.full(context.count, _IDLE, np.int8)
        clusters = context.threads.block_count // context.threads.cluster
        self._arriving: list[list[Knowledge]] = [[] for _ in range(clusters)]
        """By cluster: what this phase's arrivals hand over, see `HappensBefore.arrive`."""
        self._handed_over: list[Knowledge | None] = [None] * clusters
        """What all arrivals of the last phase did, together."""
        self._mbarriers = mbarriers_of(context)

    def arrive(self, arrival: ClusterArrival, active: ActiveThreads) -> list[tuple[int, Mask]]:
        """Note the arrival; returns (pc, mask) of waiting threads that may go on. Raises `AsyncFault` on a second
        arrival at one phase."""
        self._require(active, _IDLE, "arrives twice", arrival.ins)
        self._state[active.index] = _ARRIVED
        if arrival.relaxed:
            self._mbarriers.announce(active)
        elif self.context.races is not None:
            for warp in active.warps.tolist():
                known = self.context.races.synchronize().arrive(warp)
                self._arriving[warp // self.context.threads.cluster_warps].append(known)
        return self.release()

    def wait(self, wait: ClusterWait, active: ActiveThreads, following_pc: int) -> list[tuple[int, Mask]]:
        """(pc, mask) of the threads that go on at once; the others are parked. Raises `AsyncFault` if one of them has
        not arrived."""
        idle = active.select(self._state) == _IDLE
        if idle.any():
            who = self.context.threads.describe(int(active.index[int(idle.argmax())]))
            raise AsyncFault(f"{who} waits at the barrier of its cluster without having arrived, in {wait.ins}.")
        at = self.waiting_at.setdefault(following_pc, np.zeros(self.context.count, np.bool_))
        at |= active.full_mask
        return self.release()

    def release(self) -> list[tuple[int, Mask]]:
        """Complete the phases at which all threads that are left have arrived; also called when threads exit."""
        size = self.context.threads.cluster_warps * WARP
        missing = (self.context.alive & (self._state != _ARRIVED)).reshape(-1, size).any(1)
        arrived = (self._state == _ARRIVED).reshape(-1, size)
        for cluster in np.flatnonzero(~missing & arrived.any(1)).tolist():
            state = self._state[cluster * size : (cluster + 1) * size]
            state[state == _ARRIVED] = _COMPLETE
            told, self._arriving[cluster] = self._arriving[cluster], []
            for knowledge in told[1:]:
                told[0].join(knowledge)
            self._handed_over[cluster] = told[0] if told else None
            self._mbarriers.complete_announcement(cluster)
        released = []
        for pc, mask in list(self.waiting_at.items()):
            going = mask & (self._state == _COMPLETE)
            if going.any():
                self._pass(going)
                released.append((pc, going))
                mask &= ~going
                if not mask.any():
                    del self.waiting_at[pc]
        return released

    def _pass(self, going: Mask) -> None:
        self._state[going] = _IDLE
        warps = np.flatnonzero(going.reshape(-1, WARP).any(1))
        self._mbarriers.hear(warps)
        if self.context.races is None:
            return
        size = self.context.threads.cluster_warps
        for cluster in np.unique(warps // size).tolist():
            if knowledge := self._handed_over[cluster]:
                order, of_cluster = self.context.races.synchronize(), warps[warps // size == cluster]
                order.acquire(of_cluster, knowledge)
                floor = knowledge.known[of_cluster % size]
                order.warp_floor[of_cluster] = np.maximum(order.warp_floor[of_cluster], floor)

    def _require(self, active: ActiveThreads, state: int, what: str, ins: Instruction) -> None:
        wrong = active.select(self._state) != state
        if wrong.any():
            who = self.context.threads.describe(int(active.index[int(wrong.argmax())]))
            raise AsyncFault(f"{who} {what} at the barrier of its cluster with no wait between, in {ins}.")


@instruction(
    "barrier", r"\.cluster\.arrive(?P<order>\.release|\.relaxed)?(?:\.aligned)?", kind="barrier", pure=False, writes=0
)
def arrive(context: Context, ins: Instruction, fields: Fields) -> ClusterArrival:
    return ClusterArrival(ins, fields["order"] == ".relaxed")


@instruction("barrier", r"\.cluster\.wait(?:\.acquire)?(?:\.aligned)?", kind="barrier", pure=False, writes=0)
def wait(context: Context, ins: Instruction, fields: Fields) -> ClusterWait:
    return ClusterWait(ins)
