"""mbarriers (sm_90): barriers in shared memory that count arrivals and bytes copied. Phases alternate in parity; the
state that an arrival returns is the number of its phase. `phase_waits.py` has those who wait."""

import numpy as np

from evoattn.ptx.errors import AsyncFault
from evoattn.ptx.program.kernel import Instruction, Mask, Numbers
from evoattn.ptx.program.threads import WARP, ActiveThreads
from evoattn.ptx.races.happens_before import Knowledge
from evoattn.ptx.races.phases import Phases
from evoattn.ptx.races.watch import Races
from evoattn.ptx.state.context import Context, Mbarrier

MAX_COUNT = (1 << 20) - 1
"""Of arrivals and of bytes that a phase can wait for (PTX ISA, mbarrier)."""
BYTES = 8


class Mbarriers:
    """All of one machine, by their byte index in its shared memory."""

    def __init__(self, context: Context) -> None:
        self.context, self.threads = context, context.threads
        self._barriers: dict[int, Mbarrier] = {}
        self._signatures = context.shared.elements(BYTES)

    # ---- life

    def make(self, index: int, count: int, thread: int, ins: Instruction) -> None:
        """Initialize the mbarrier at a byte of shared memory. Raises `AsyncFault` on a count that none can have, and
        where there is one already (PTX ISA, mbarrier.init)."""
        if index in self._barriers:
            raise AsyncFault(
                f"{self.threads.describe(thread)} initialises the mbarrier at byte "
                f"{self.context.shared.byte(index)} of shared memory again, in {ins}."
            )
        if not 1 <= count <= MAX_COUNT:
            raise AsyncFault(f"{self.threads.describe(thread)} asks for an mbarrier of {count} arrivals in {ins}.")
        races = self.context.races
        columns, now = (0, 0) if races is None else (races.order.clock.shape[1], races.order.now)
        known_by = np.zeros(self.threads.count, np.bool_)
        known_by[thread] = True
        a, b, c, d = map(Knowledge, np.zeros((4, columns), np.int64))
        offset = self.context.shared.byte(index)
        self._barriers[index] = Mbarrier(index, offset, count, count, thread, now, known_by, a, b, c, d)
        if races is not None:
            self._barriers[index].order = Phases(races.shared, offset)
        self._signatures[index // BYTES] = _signature(index)

    def remove(self, index: int, thread: int, ins: Instruction) -> None:
        """`mbarrier.inval`. Raises `AsyncFault` as `find` does."""
        self.find(index, thread, ins)
        del self._barriers[index]

    def find(self, index: int, thread: int, ins: Instruction) -> Mbarrier:
        """The mbarrier at a byte of shared memory, for this thread to use. Raises `AsyncFault` if it is none, or is
        overwritten."""
        barrier = self._barriers.get(index)
        if barrier is None:
            raise AsyncFault(
                f"{self.threads.describe(thread)} uses byte {self.context.shared.byte(index)} of shared memory, "
                f"which is no initialised mbarrier, in {ins}."
            )
        if self._signatures[index // BYTES] != _signature(index):
            raise AsyncFault(
                f"The mbarrier at byte {barrier.offset} of shared memory has been overwritten before {ins}."
            )
        if self.context.races is not None and not barrier.known_by[thread]:
            self._check_known(self.context.races, barrier, np.array([thread]), ins)
        return barrier

    def find_for_all(self, index: int, mask: Mask, ins: Instruction) -> Mbarrier:
        """As `find`, for some threads (bool over all)."""
        barrier = self.find(index, int(mask.argmax()), ins)
        if self.context.races is not None:
            new = np.flatnonzero(mask & ~barrier.known_by)
            if len(new):
                self._check_known(self.context.races, barrier, new, ins)
        return barrier

    def _check_known(self, races: Races, barrier: Mbarrier, threads: Numbers, ins: Instruction) -> None:
        """The threads must have met the maker since the initialization."""
        barrier.known_by[threads] = True
        order, name = races.order, races.shared.actors.name
        unmet = barrier.made_at > order.block_floor[threads // self.threads.block_threads]
        if not np.count_nonzero(unmet):
            return
        column, lane = order.column_of[barrier.maker], order.lane_of[barrier.maker]
        made = [np.full(len(threads), x) for x in (column, lane, barrier.made_at)]
        unmet &= order.unordered(threads, *made)
        if unmet.any():
            thread = int(threads[int(unmet.argmax())])
            block = self.threads.block_of[thread] + self.threads.first_block
            races.shared.report(
                ins,
                f"{name(thread)} of block {block} uses the mbarrier at byte {barrier.offset} that "
                f"{name(barrier.maker)} "
                "initialised, with no barrier between",
            )

    def fence(self, active: ActiveThreads, for_cluster: bool = False) -> None:
        """The tensor copy engine sees what these threads have initialised; `for_cluster`: other blocks may see it
        too."""
        for barrier in self._barriers.values():
            if active.full_mask[barrier.maker]:
                barrier.fenced = True
                barrier.fenced_for_cluster |= for_cluster

    def announce(self, active: ActiveThreads) -> None:
        """These threads arrive at the barrier of their cluster, where others learn of what they have initialised and
        fenced."""
        for barrier in self._barriers.values():
            barrier.announced |= barrier.fenced_for_cluster and bool(active.full_mask[barrier.maker])

    def complete_announcement(self, cluster: int) -> None:
        """All threads of a cluster have arrived."""
        for barrier in self._barriers.values():
            if barrier.maker // WARP // self.threads.cluster_warps == cluster:
                barrier.told_cluster |= barrier.announced

    def hear(self, warps: Numbers) -> None:
        """These warps have waited at the barrier of their cluster."""
        for barrier in self._barriers.values():
            if barrier.told_cluster:
                cluster = barrier.maker // WARP // self.threads.cluster_warps
                heard = warps[warps // self.threads.cluster_warps == cluster]
                barrier.known_by.reshape(-1, WARP)[heard] = True

    # ---- phases

    def arrive(
        self, index: Numbers, counts: Numbers, expected_bytes: Numbers, active: ActiveThreads, ins: Instruction
    ) -> list[int]:
        """One arrival per thread, after its phase expects so many bytes more; returns the numbers of the phases that
        they arrived at.

        Raises `AsyncFault` on more arrivals than a phase counts."""
        races, phases = self.context.races, []
        handed_over: dict[int, Knowledge] = {}
        together = _at_one_place(index, active, self.context.alive)
        each = zip(active.index.tolist(), index.tolist(), counts.tolist(), expected_bytes.tolist())
        for thread, at, count, size in each:
            barrier = self.find(at, thread, ins)
            phases.append(barrier.phase)
            if races is not None and barrier.order is not None:
                barrier.order.require_end(thread, ins)
                warp, lane = divmod(thread, WARP)
                whole = warp in together
                key = warp * WARP if whole else thread
                if key not in handed_over:
                    handed_over[key] = races.synchronize().arrive(warp, None if whole else lane)
                own = at // self.context.shared.stride == warp // self.threads.block_warps
                kept = barrier.handed_over if own else barrier.cluster_over
                kept.join(handed_over[key])
                barrier.order.arrive(warp, None if whole else lane, races.order.now - 1, ins)
            self.expect(barrier, size, ins)
            barrier.pending -= count
            if barrier.pending < 0:
                raise AsyncFault(
                    f"{self.threads.describe(thread)} makes an arrival over the {barrier.count} that a phase of the "
                    f"mbarrier at byte {barrier.offset} of shared memory counts, in {ins}."
                )
            self._end_phase(barrier)
        return phases

    def expect(self, barrier: Mbarrier, size: int, ins: Instruction) -> None:
        """The phase waits for `size` bytes more. Raises `AsyncFault` beyond what it can count."""
        barrier.tx_bytes += size
        if size and barrier.order is not None:
            barrier.order.expect_bytes()
        if barrier.tx_bytes > MAX_COUNT:
            raise AsyncFault(
                f"The mbarrier at byte {barrier.offset} of shared memory expects {barrier.tx_bytes} bytes, over "
                f"{MAX_COUNT}, in {ins}."
            )

    def complete(self, barrier: Mbarrier, size: int, agent: int, to_cluster: bool = False) -> None:
        """An agent has copied bytes that this phase counts."""
        if self.context.races is not None:
            order = self.context.races.order
            kept = barrier.cluster_over if to_cluster else barrier.handed_over
            kept.known[self.threads.cluster_warps + agent] = order.now
            order.now += 1
        barrier.tx_bytes -= size
        self._end_phase(barrier)

    def _end_phase(self, barrier: Mbarrier) -> None:
        if barrier.pending or barrier.tx_bytes:
            return
        if barrier.order is not None:
            barrier.order.end((barrier.handed_over, barrier.cluster_over))
        barrier.phase += 1
        barrier.pending = barrier.count
        barrier.known.join(barrier.handed_over)
        barrier.cluster_known.join(barrier.cluster_over)
        for told in self.context.at_phase_end:
            told(barrier)


def _at_one_place(index: Numbers, active: ActiveThreads, alive: Mask) -> set[int]:
    """The warps of which all threads that are left are active, at one `index`."""
    whole = np.flatnonzero((active.by_warp | ~alive.reshape(-1, WARP)).all(1) & active.by_warp.any(1))
    if not len(whole):
        return set()
    places = np.full(active.threads.count, -1)
    places[active.index] = index
    first = active.by_warp[whole].argmax(1)
    places = places.reshape(-1, WARP)[whole]
    same = ((places == places[np.arange(len(whole)), first][:, None]) | ~active.by_warp[whole]).all(1)
    return set(whole[same].tolist())


def _signature(index: int) -> int:
    """What an mbarrier's bytes hold: nothing that a program writes by chance."""
    return 0x6D62617272696572 ^ index


def mbarriers_of(context: Context) -> Mbarriers:
    """The mbarriers of a machine, made on the first call."""
    return context.cached("mbarriers", lambda: Mbarriers(context))
