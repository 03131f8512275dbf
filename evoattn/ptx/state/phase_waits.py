"""Threads that wait for phases of mbarriers.

A thread that waits for a phase which has not ended is parked until it ends, so that loops around `try_wait` do not
spin."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evoattn.ptx.program.kernel import Instruction, Lanes, Mask, Numbers
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.state.context import Context, Ending, Mbarrier
from evoattn.ptx.state.mbarriers import mbarriers_of


@dataclass(frozen=True)
class PhaseWait(Ending):
    """Threads pass when the phase of this parity (or state) has ended; `target` says that it has."""

    ins: Instruction
    locate: Callable[[ActiveThreads], Numbers]
    """Byte index in shared memory of each active thread's mbarrier."""
    phase: Lanes
    target: Mask
    of_cluster: bool
    """Acquires what other blocks have done, not just the own one."""
    patient: bool
    """Waits as long as it takes (`try_wait`), not just while others can run (`test_wait`)."""


@dataclass
class _Parked:
    """Threads that wait for an mbarrier's phase of some parity to end."""

    barrier: Mbarrier
    parity: int
    pc: int
    mask: Mask
    wait: PhaseWait


class PhaseWaits:
    """Of one machine. `woken` has (pc, mask) of threads whose phase has ended since it was last emptied."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._barriers = mbarriers_of(context)
        context.at_phase_end.append(self._wake)
        self._parked: list[_Parked] = []
        self.woken: list[tuple[int, Mask]] = []

    @property
    def waiting_at(self) -> set[int]:
        """The pcs at which parked threads will go on."""
        return {parked.pc for parked in self._parked}

    def wait(self, wait: PhaseWait, active: ActiveThreads, pc: int) -> Mask | None:
        """Park the threads whose phase has not ended; they go on at `pc`. Returns the mask of the others, None if they
        are all."""
        keys = wait.locate(active) * 2 + (active.select(wait.phase) & wait.phase.dtype.type(1)).astype(np.int64)
        different = keys[:1] if (keys == keys[0]).all() else np.unique(keys)
        passing = np.zeros(self.context.count, np.bool_)
        parked = False
        for key in different.tolist():
            mask = active.full_mask
            if len(different) > 1:
                mask = np.zeros(self.context.count, np.bool_)
                mask[active.index[keys == key]] = True
            barrier = self._barriers.find_for_all(key // 2, mask, wait.ins)
            if barrier.phase % 2 != key % 2:
                self._see(barrier, mask, wait.of_cluster)
                passing |= mask
            else:
                self._parked.append(_Parked(barrier, key % 2, pc, mask.copy(), wait))
                parked = True
        np.copyto(wait.target, True, where=passing)
        return passing if parked else None

    def _wake(self, barrier: Mbarrier) -> None:
        """A phase has ended."""
        left = []
        for parked in self._parked:
            if parked.barrier is barrier and parked.parity != barrier.phase % 2:
                self._see(barrier, parked.mask, parked.wait.of_cluster)
                np.copyto(parked.wait.target, True, where=parked.mask)
                self.woken.append((parked.pc, parked.mask))
            else:
                left.append(parked)
        self._parked = left

    def _see(self, barrier: Mbarrier, mask: Mask, of_cluster: bool) -> None:
        """These threads see that the last phase has ended."""
        if self.context.races is not None:
            order, by_warp = self.context.races.synchronize(), mask.reshape(-1, WARP)
            left = self.context.alive.reshape(-1, WARP)
            some = by_warp.any(1)
            whole = some & (by_warp | ~left).all(1)
            if barrier.order is not None:
                barrier.order.see(np.flatnonzero(some).tolist())
            for known in (barrier.known, barrier.cluster_known)[: 1 + of_cluster]:
                order.acquire(np.flatnonzero(whole), known)
                for warp in np.flatnonzero(some & ~whole).tolist():
                    order.acquire_by_lanes(warp, by_warp[warp], left[warp], known)

    def give_up(self) -> list[tuple[int, Mask]]:
        """(pc, mask) of threads that wait only while others can run, now that none can: their answer is no."""
        gone = [parked for parked in self._parked if not parked.wait.patient]
        self._parked = [parked for parked in self._parked if parked.wait.patient]
        for parked in gone:
            np.copyto(parked.wait.target, False, where=parked.mask)
        return [(parked.pc, parked.mask) for parked in gone]

    def describe(self) -> list[str]:
        """Who is parked where, in words."""
        texts: dict[tuple[int, int], str] = {}
        for parked in self._parked:
            barrier = parked.barrier
            texts.setdefault(
                (parked.pc, barrier.offset),
                f"{np.count_nonzero(parked.mask)} threads at {parked.wait.ins} for a phase of the mbarrier at byte "
                f"{barrier.offset} of shared memory, which lacks {barrier.pending} arrivals and {barrier.tx_bytes} "
                "bytes",
            )
        return list(texts.values())
