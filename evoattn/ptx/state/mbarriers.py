"""mbarriers (sm_90): barriers in shared memory that count arrivals and bytes copied, and the threads that wait for their phases.

A thread that waits for a phase which has not ended is parked until it ends, so that loops around `try_wait` do not spin. Phases alternate
in parity; the state that an arrival returns is the number of its phase. A phase ends when all arrivals are made and the bytes expected
have come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evoattn.ptx.errors import AsyncFault
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.state.context import Context

MAX_COUNT = (1 << 20) - 1
"""Of arrivals and of bytes that a phase can wait for (PTX ISA, mbarrier)."""
BYTES = 8


@dataclass
class _Mbarrier:
    """One in the memory of one block."""

    offset: int
    count: int
    pending: int
    maker: int
    made_at: int
    known_by: set[int]
    """Warps that are known to come after the initialization."""
    handed_over: np.ndarray | None
    """By those that arrived in this phase; see `HappensBefore.arrive`. None where races are not looked for."""
    known: np.ndarray | None
    """What those learn who see that the last phase has ended."""
    cluster_over: np.ndarray | None
    """As `handed_over`, by other blocks and stores for the cluster: what only a wait of cluster scope acquires."""
    cluster_known: np.ndarray | None
    tx_bytes: int = 0
    phase: int = 0
    fenced: bool = False
    fenced_for_cluster: bool = False
    announced: bool = False
    """A relaxed arrival at the cluster's barrier came after that fence."""
    told_cluster: bool = False
    """And the barrier was complete."""


@dataclass
class _Parked:
    """Threads that wait for an mbarrier's phase of some parity to end."""

    index: int
    parity: int
    pc: int
    mask: np.ndarray
    target: np.ndarray
    of_cluster: bool
    patient: bool
    """Waits as long as it takes (`try_wait`), not just while others can run (`test_wait`)."""


class Mbarriers:
    """All of one machine, by their byte index in its shared memory. `woken` has (pc, mask) of threads whose phase has ended."""

    def __init__(self, context: Context) -> None:
        self.context, self.threads = context, context.threads
        self._barriers: dict[int, _Mbarrier] = {}
        self._parked: list[_Parked] = []
        self._signatures = context.shared.elements(BYTES)
        self.woken: list[tuple[int, np.ndarray]] = []

    # ---- life

    def make(self, index: int, count: int, thread: int, ins: Instruction) -> None:
        if not 1 <= count <= MAX_COUNT:
            raise AsyncFault(f"{self.threads.describe(thread)} asks for an mbarrier of {count} arrivals in {ins}.")
        order = None if self.context.races is None else self.context.races.order
        columns = None if order is None else np.zeros(order.clock.shape[1], np.int64)
        offset = index % self.context.shared.stride
        vectors = [None if columns is None else columns.copy() for _ in range(4)]
        made_at = 0 if order is None else order.now
        self._barriers[index] = _Mbarrier(offset, count, count, thread, made_at, {thread // WARP}, *vectors)
        self._signatures[index // BYTES] = _signature(index)

    def remove(self, index: int, thread: int, ins: Instruction) -> None:
        self.find(index, thread, ins)
        del self._barriers[index]

    def find(self, index: int, thread: int, ins: Instruction) -> _Mbarrier:
        """The mbarrier at a byte of shared memory, for this thread to use. Raises `AsyncFault` if it is none, or is overwritten."""
        barrier = self._barriers.get(index)
        if barrier is None:
            raise AsyncFault(
                f"{self.threads.describe(thread)} uses byte {index % self.context.shared.stride} of shared memory, which is no initialised "
                f"mbarrier, in {ins}."
            )
        if self._signatures[index // BYTES] != _signature(index):
            raise AsyncFault(
                f"The mbarrier at byte {barrier.offset} of shared memory has been overwritten before {ins}."
            )
        if self.context.races is not None and thread // WARP not in barrier.known_by:
            self._check_known(barrier, thread, ins)
        return barrier

    def _check_known(self, barrier: _Mbarrier, thread: int, ins: Instruction) -> None:
        barrier.known_by.add(thread // WARP)
        races = self.context.races
        one = [
            np.array([x])
            for x in (thread, races.order.column_of[barrier.maker], races.order.lane_of[barrier.maker], barrier.made_at)
        ]
        if (
            barrier.made_at > races.order.block_floor[thread // self.threads.block_threads]
            and races.order.unordered(*one).any()
        ):
            races.report(
                ins,
                f"{races.name(thread)} of block {self.threads.block_of[thread] + self.threads.first_block} uses the mbarrier at byte "
                f"{barrier.offset} that {races.name(barrier.maker)} initialised, with no barrier between",
            )

    def fence(self, active: ActiveThreads, for_cluster: bool = False) -> None:
        """The tensor copy engine sees what these threads have initialised; `for_cluster`: other blocks may see it too."""
        for barrier in self._barriers.values():
            if active.full_mask[barrier.maker]:
                barrier.fenced = True
                barrier.fenced_for_cluster |= for_cluster

    def announce(self, active: ActiveThreads) -> None:
        """These threads arrive at the barrier of their cluster, where others learn of what they have initialised and fenced."""
        for barrier in self._barriers.values():
            barrier.announced |= barrier.fenced_for_cluster and bool(active.full_mask[barrier.maker])

    def complete_announcement(self, cluster: int) -> None:
        """All threads of a cluster have arrived."""
        for barrier in self._barriers.values():
            if barrier.maker // WARP // self.threads.cluster_warps == cluster:
                barrier.told_cluster |= barrier.announced

    def hear(self, warps: np.ndarray) -> None:
        """These warps have waited at the barrier of their cluster."""
        for barrier in self._barriers.values():
            if barrier.told_cluster:
                cluster = barrier.maker // WARP // self.threads.cluster_warps
                barrier.known_by.update(warps[warps // self.threads.cluster_warps == cluster].tolist())

    # ---- phases

    def arrive(
        self, index: np.ndarray, counts: np.ndarray, expected_bytes: np.ndarray, active: ActiveThreads, ins: Instruction
    ) -> list[int]:
        """One arrival a thread, after its phase expects so many bytes more; returns the numbers of the phases that they arrived at."""
        races, handed_over, phases = self.context.races, {}, []
        for thread, at, count, size in zip(
            active.index.tolist(), index.tolist(), counts.tolist(), expected_bytes.tolist()
        ):
            barrier = self.find(at, thread, ins)
            phases.append(barrier.phase)
            if races is not None:
                warp = thread // WARP
                if warp not in handed_over:
                    handed_over[warp] = races.synchronize().arrive(warp)
                own = at // self.context.shared.stride == warp // self.threads.block_warps
                kept = barrier.handed_over if own else barrier.cluster_over
                np.maximum(kept, handed_over[warp], out=kept)
            self.expect(barrier, size, ins)
            barrier.pending -= count
            if barrier.pending < 0:
                raise AsyncFault(
                    f"{self.threads.describe(thread)} makes an arrival over the {barrier.count} that a phase of the mbarrier at byte "
                    f"{barrier.offset} of shared memory counts, in {ins}."
                )
            self._end_phase(at, barrier)
        return phases

    def expect(self, barrier: _Mbarrier, size: int, ins: Instruction) -> None:
        barrier.tx_bytes += size
        if barrier.tx_bytes > MAX_COUNT:
            raise AsyncFault(
                f"The mbarrier at byte {barrier.offset} of shared memory expects {barrier.tx_bytes} bytes, over {MAX_COUNT}, in {ins}."
            )

    def complete(self, index: int, barrier: _Mbarrier, size: int, agent: int, to_cluster: bool = False) -> None:
        """An agent has copied bytes that this phase counts."""
        if barrier.handed_over is not None:
            order = self.context.races.order
            kept = barrier.cluster_over if to_cluster else barrier.handed_over
            kept[self.threads.cluster_warps + agent] = order.now
            order.now += 1
        barrier.tx_bytes -= size
        self._end_phase(index, barrier)

    def _end_phase(self, index: int, barrier: _Mbarrier) -> None:
        if barrier.pending or barrier.tx_bytes:
            return
        barrier.phase += 1
        barrier.pending = barrier.count
        if barrier.known is not None:
            np.maximum(barrier.known, barrier.handed_over, out=barrier.known)
            np.maximum(barrier.cluster_known, barrier.cluster_over, out=barrier.cluster_known)
        left = []
        for parked in self._parked:
            if parked.index == index and parked.parity != barrier.phase % 2:
                self._wake(parked, barrier)
            else:
                left.append(parked)
        self._parked = left

    def _wake(self, parked: _Parked, barrier: _Mbarrier) -> None:
        self._see(barrier, parked.mask, parked.of_cluster)
        np.copyto(parked.target, True, where=parked.mask)
        self.woken.append((parked.pc, parked.mask))

    def _see(self, barrier: _Mbarrier, mask: np.ndarray, of_cluster: bool) -> None:
        """These threads see that the last phase has ended."""
        if barrier.known is not None:
            warps = np.flatnonzero(mask.reshape(-1, WARP).any(1))
            self.context.races.synchronize().acquire(warps, barrier.known)
            if of_cluster:
                self.context.races.order.acquire(warps, barrier.cluster_known)

    # ---- waiting

    @property
    def waiting_at(self) -> set[int]:
        """The pcs at which parked threads will go on."""
        return {parked.pc for parked in self._parked}

    def wait(self, wait: PhaseWait, active: ActiveThreads, pc: int) -> np.ndarray | None:
        """Park the threads whose phase has not ended; they go on at `pc`. Returns the mask of the others, None if they are all."""
        index = wait.locate(active)
        keys = index * 2 + (active.select(wait.phase) & wait.phase.dtype.type(1)).astype(np.int64)
        different = keys[:1] if (keys == keys[0]).all() else np.unique(keys)
        passing = np.zeros(self.context.count, np.bool_)
        parked = False
        for key in different.tolist():
            mask = active.full_mask
            if len(different) > 1:
                mask = np.zeros(self.context.count, np.bool_)
                mask[active.index[keys == key]] = True
            barrier = self.find(key // 2, int(mask.argmax()), wait.ins)
            for warp in np.flatnonzero(mask.reshape(-1, WARP).any(1)).tolist():
                if warp not in barrier.known_by:
                    self.find(key // 2, warp * WARP + int(mask[warp * WARP : (warp + 1) * WARP].argmax()), wait.ins)
            if barrier.phase % 2 != key % 2:
                self._see(barrier, mask, wait.of_cluster)
                passing |= mask
            else:
                self._parked.append(
                    _Parked(key // 2, key % 2, pc, mask.copy(), wait.target, wait.of_cluster, wait.patient)
                )
                parked = True
        np.copyto(wait.target, True, where=passing)
        return passing if parked else None

    def give_up(self) -> list[tuple[int, np.ndarray]]:
        """(pc, mask) of threads that wait only while others can run, now that none can: their answer is no."""
        gone = [parked for parked in self._parked if not parked.patient]
        self._parked = [parked for parked in self._parked if parked.patient]
        for parked in gone:
            np.copyto(parked.target, False, where=parked.mask)
        return [(parked.pc, parked.mask) for parked in gone]

    def describe_waits(self) -> list[str]:
        """Who is parked where, in words."""
        texts = {}
        for parked in self._parked:
            barrier = self._barriers[parked.index]
            texts.setdefault(
                (parked.pc, barrier.offset),
                (
                    f"{np.count_nonzero(parked.mask)} threads at {self.context.kernel.instructions[parked.pc - 1]} for a phase of the mbarrier "
                    f"at byte {barrier.offset} of shared memory, which lacks {barrier.pending} arrivals and {barrier.tx_bytes} bytes"
                ),
            )
        return list(texts.values())


def _signature(index: int) -> int:
    """What an mbarrier's bytes hold: nothing that a program writes by chance."""
    return 0x6D62617272696572 ^ index


def mbarriers_of(context: Context) -> Mbarriers:
    """The mbarriers of a machine, made on the first call."""
    return context.cached("mbarriers", lambda: Mbarriers(context))


@dataclass(frozen=True)
class PhaseWait:
    """What the scheduler acts on: threads pass when the phase of this parity (or state) has ended; `target` says that it has."""

    ins: Instruction
    locate: Callable[[ActiveThreads], np.ndarray]
    phase: np.ndarray
    target: np.ndarray
    of_cluster: bool
    """Acquires what other blocks have done, not just the own one."""
    patient: bool
