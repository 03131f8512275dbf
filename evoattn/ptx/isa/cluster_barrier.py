"""Clusters (sm_90): addresses in the shared memory of other blocks, stores into it that complete on an mbarrier; and
barrier.cluster, the barrier of all threads of a cluster, in two halves.

A phase is complete when every thread of the cluster that is left has arrived; only then do those that wait go on. What
the arriving warps knew passes to those that wait, except from `arrive.relaxed`: it tells of mbarrier initializations
alone that its own thread has fenced for the cluster (PTX ISA, barrier.cluster and fence.mbarrier_init)."""

from dataclasses import dataclass

import numpy as np

from evoattn.ptx.errors import AsyncFault
from evoattn.ptx.isa.dispatch import Action, Fields, instruction
from evoattn.ptx.isa.locator import Locator
from evoattn.ptx.memory.address_space import RANK_SHIFT, SHARED_WINDOW, as_elements
from evoattn.ptx.program.kernel import Instruction, Lanes, Mask, parse_type, vector_parts
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.happens_before import Knowledge
from evoattn.ptx.state.context import Context, Ending
from evoattn.ptx.state.mbarriers import BYTES, mbarriers_of

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


_U32 = parse_type("u32")


@instruction("mapa", r"(?P<space>\.shared::cluster)?\.(?P<type>u32|u64)", kind="int", pure=False)
def map_address(context: Context, ins: Instruction, fields: Fields) -> Action:
    """`mapa d, address, rank`: what lies at this address of the own block, in the block of that rank; without a space
    all are generic."""
    kind = parse_type(fields["type"])
    target, address = context.destination(ins.operands[0], kind), context.source(ins.operands[1], kind)
    rank = context.source(ins.operands[2], _U32)
    window = 0 if fields["space"] else SHARED_WINDOW

    def run(active: ActiveThreads) -> None:
        own = active.select(address).astype(np.int64) - window
        if ((own < 0) | (own >= context.shared.limit)).any():
            raise AsyncFault(f"An address outside the block's shared memory is mapped in {ins}.")
        ranks = active.select(rank).astype(np.int64)
        if (ranks >= context.threads.cluster).any():
            raise AsyncFault(
                f"An address is mapped to rank {ranks.max()} in a cluster of {context.threads.cluster} blocks in {ins}."
            )
        target[active.index] = own + (ranks + 1 << RANK_SHIFT) + window

    return run


_STORE = (
    r"\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes"
    r"(?:\.v(?P<vector>2|4))?\.(?P<type>[bus](?:32|64)|f32|f64)"
)


@instruction("st", _STORE, kind="memory", pure=False, writes=0)
def store(context: Context, ins: Instruction, fields: Fields) -> Action:
    """`[destination], values, [mbarrier]`, both in one block of the cluster.

    The bytes are written when they are asked for, as early as a device may; that nobody reads them before the
    mbarrier's phase has ended is for `async_proxy.py` to see. A warp stores as one."""
    kind = parse_type("b" + fields["type"][1:])
    sources = [context.source(o, kind) for o in vector_parts(ins.operands[1])]
    size = kind.bits // 8 * len(sources)
    destination = Locator(context, ins, ins.operands[0], "shared::cluster", size, None)
    places = Locator(context, ins, ins.operands[2], "shared::cluster", BYTES, None)
    barriers, races, stride = mbarriers_of(context), context.races, context.shared.stride

    def run(active: ActiveThreads) -> None:
        [(memory, index, _)], [(_, barrier_at, _)] = destination(active), places(active)
        if (index // stride != barrier_at // stride).any():
            raise AsyncFault(f"The destination and the mbarrier lie in different blocks in {ins}.")
        keys = np.stack([active.index // WARP, barrier_at])
        for warp, at in np.unique(keys, axis=1).T.tolist():
            chosen = (keys[0] == warp) & (keys[1] == at)
            barrier = barriers.find(at, int(active.index[int(chosen.argmax())]), ins)
            agent = 0
            if races is not None:
                agent = races.proxy.copies(at // stride, context.shared.byte(at), "asynchronous stores")
                shift, count = races.shared.shift, max(size >> races.shared.shift, 1)
                granules = ((index[chosen] >> shift)[:, None] + np.arange(count)).ravel()
                races.proxy.write(agent, context.count + warp, granules, ins, at // stride, proxied=False)
            barriers.complete(barrier, size * int(np.count_nonzero(chosen)), agent, to_cluster=True)
        values = np.stack([active.select(s) for s in sources], axis=1)
        memory.elements(size)[index // size] = as_elements(np.ascontiguousarray(values).reshape(-1), size)

    return run
