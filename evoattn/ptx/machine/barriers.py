"""Block barriers, plain and named: who waits, and when they go on."""

from dataclasses import dataclass, field

import numpy as np

from evoattn.ptx.errors import BarrierFault
from evoattn.ptx.isa.control import BarrierArrival
from evoattn.ptx.program.kernel import Mask, Numbers
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.happens_before import Knowledge
from evoattn.ptx.state.context import Context

NUMBERS = 16
"""Of a block's barriers (PTX ISA, barrier)."""


@dataclass
class _Barrier:
    """One barrier number in all blocks."""

    waiting: Mask
    """Bool over threads."""
    expected: Numbers
    """Threads per block, 0 for all that are left."""
    signalled: Numbers
    """Threads per block that arrived without waiting."""
    handed_over: dict[int, list[Knowledge]] = field(default_factory=dict)
    """By block: what those knew of the others' accesses, for the race detector."""


class Barriers:
    """`waiting_at` maps the pc after a barrier to the threads that will go on there."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.waiting_at: dict[int, Mask] = {}
        self._barriers: dict[int, _Barrier] = {}
        self._last_phases: dict[tuple[int, int], tuple[int, Numbers]] = {}
        """By barrier and block: when the last phase ended, and the warps that waited for that."""
        self._of_some: set[int] = set()
        """Barriers of which phases were waited for by some of a block's warps alone."""

    def passes_at_once(self, arrival: BarrierArrival, active: ActiveThreads) -> bool:
        """Whether all threads of the machine meet here, so that nobody waits; the common case."""
        if not active.all or not arrival.waits or arrival.number.ndim or self.waiting_at:
            return False
        threads = self.context.threads
        number = int(arrival.number)
        if arrival.expected not in (None, threads.block_threads) or number in self._barriers or number >= NUMBERS:
            return False
        if number in self._of_some:
            return False
        self.context.apart = None
        if self.context.races is not None:
            self.context.races.shared.barrier(np.arange(threads.block_count))
        return True

    def arrive(self, arrival: BarrierArrival, active: ActiveThreads, following_pc: int) -> list[tuple[int, Mask]]:
        """Note the arrival; returns (pc, mask) of the threads that may go on. Raises `BarrierFault`."""
        numbers = np.unique(active.select(arrival.number))
        released: list[tuple[int, Mask]] = []
        for number in numbers.tolist():
            if number >= NUMBERS:
                raise BarrierFault(f"A block has no barrier {number}, but {NUMBERS}, in {arrival.ins}.")
            mask = active.full_mask if len(numbers) == 1 else active.full_mask & (arrival.number == number)
            barrier = self._barriers.setdefault(number, self._new())
            if arrival.expected is not None:
                self._check_count(number, barrier, arrival, mask)
            if number in self._of_some:
                self._check_phase(number, arrival, mask)
            blocks = np.flatnonzero(self._per_block(mask))
            barrier.expected[blocks] = arrival.expected or 0
            if arrival.waits:
                barrier.waiting |= mask
                at = self.waiting_at.setdefault(following_pc, np.zeros_like(mask))
                at |= mask
            else:
                self._signal(barrier, mask)
                released.append((following_pc, mask))
        return released + self.release()

    def _check_count(self, number: int, barrier: _Barrier, arrival: BarrierArrival, mask: Mask) -> None:
        """No more threads arrive at a barrier than it counts. Raises `BarrierFault`."""
        threads = self.context.threads
        arriving = self._per_block(mask)
        present = self._per_block(barrier.waiting) + barrier.signalled
        for block in np.flatnonzero(arriving).tolist():
            where = f"of block {block + threads.first_block} at barrier {number}, in {arrival.ins}"
            others = int(barrier.expected[block])
            if present[block] and others != arrival.expected:
                raise BarrierFault(f"Threads count {others} and {arrival.expected} {where}.")
            if present[block] + arriving[block] > (arrival.expected or 0):
                raise BarrierFault(
                    f"{present[block] + arriving[block]} threads {where}, which counts {arrival.expected}."
                )

    def _check_phase(self, number: int, arrival: BarrierArrival, mask: Mask) -> None:
        """Threads arrive no earlier than a barrier's phase begins.

        A warp that does not know that the last phase has ended may arrive while it lasts, in another order of
        execution: at `__syncthreads()` too, which is barrier 0. Raises `BarrierFault`."""
        if self.context.races is None:
            return
        threads, order = self.context.threads, self.context.races.order
        for warp in np.flatnonzero(mask.reshape(-1, WARP).any(1)).tolist():
            block = warp // threads.block_warps
            time, waiters = self._last_phases.get((number, block), (0, None))
            if waiters is None or time <= order.block_floor[block]:
                continue
            if not (order.clock[warp, waiters % threads.cluster_warps] >= time).any():
                raise BarrierFault(
                    f"{threads.describe(warp * WARP)} may arrive at barrier {number} before its last phase has ended: "
                    f"nothing tells its warp so, in {arrival.ins}."
                )

    def _new(self) -> _Barrier:
        count = self.context.threads.block_count
        return _Barrier(np.zeros(self.context.count, np.bool_), np.zeros(count, np.int64), np.zeros(count, np.int64))

    def _per_block(self, mask: Mask) -> Numbers:
        per_block: Numbers = np.count_nonzero(mask.reshape(self.context.threads.block_count, -1), axis=1)
        return per_block

    def _signal(self, barrier: _Barrier, mask: Mask) -> None:
        barrier.signalled += self._per_block(mask)
        if self.context.races is not None:
            for warp in np.flatnonzero(mask.reshape(-1, WARP).any(1)):
                block = int(warp) // self.context.threads.block_warps
                barrier.handed_over.setdefault(block, []).append(self.context.races.synchronize().arrive(int(warp)))

    def release(self) -> list[tuple[int, Mask]]:
        """Let go of the barriers that are complete; also called when threads exit, since the others no longer wait for
        them."""
        free = np.zeros(self.context.count, np.bool_)
        left = self._per_block(self.context.alive)
        for number, barrier in list(self._barriers.items()):
            waiting = self._per_block(barrier.waiting)
            wanted = np.where(barrier.expected > 0, barrier.expected, left)
            complete = (waiting > 0) & (waiting + barrier.signalled >= wanted)
            if not complete.any():
                continue
            self._order(number, barrier, complete, waiting == self.context.threads.real_threads)
            chosen = np.repeat(complete, self.context.threads.block_threads) & barrier.waiting
            barrier.waiting &= ~chosen
            barrier.signalled[complete] = 0
            free |= chosen
            if not barrier.waiting.any() and not barrier.signalled.any():
                del self._barriers[number]
        if not free.any():
            return []
        if self.context.apart is not None:
            by_warp = free.reshape(-1, WARP)
            whole = by_warp.any(1) & (by_warp | ~self.context.alive.reshape(-1, WARP)).all(1)
            self.context.come_together(np.flatnonzero(whole))
        released = []
        for pc, mask in list(self.waiting_at.items()):
            going = mask & free
            if going.any():
                released.append((pc, going))
                mask &= ~going
                if not mask.any():
                    del self.waiting_at[pc]
        return released

    def _order(self, number: int, barrier: _Barrier, complete: Mask, everyone: Mask) -> None:
        """Tell the race detector who met whom: threads that have exited do not (CUDA C++ programming guide,
        __syncthreads: of threads that have not)."""
        races = self.context.races
        if races is None:
            return
        whole = complete & everyone
        if whole.any():
            races.shared.barrier(np.flatnonzero(whole))
        for block in np.flatnonzero(complete & ~everyone).tolist():
            size = self.context.threads.block_threads
            warps = np.flatnonzero(barrier.waiting[block * size : (block + 1) * size].reshape(-1, WARP).any(1))
            warps += block * self.context.threads.block_warps
            order = races.synchronize()
            self._last_phases[number, block] = order.now, warps
            self._of_some.add(number)
            order.barrier_of_warps(warps, barrier.handed_over.pop(block, []))
