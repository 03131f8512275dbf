"""Phases of an mbarrier hold in every order of execution, not only in the one that ran.

Who adds to a phase knows that the phase before has ended: else, in another order, it would add to that one. And who
ends a phase knows that all who wait for the end of the phase before have seen it: else a slower one would find its
parity gone. Knowledge of an end is that of somebody who has waited for it, or, where no bytes were expected, of all
arrivals."""

from dataclasses import dataclass

import numpy as np

from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.program.threads import WARP
from evoattn.ptx.races.happens_before import SEVERAL, Knowledge
from evoattn.ptx.races.shared_accesses import SharedRaces


@dataclass(frozen=True)
class _Arrival:
    warp: int
    lane: int
    """SEVERAL for the whole warp."""
    time: int


class Phases:
    """Of one mbarrier; what is wrong is reported to the detector, and execution goes on."""

    def __init__(self, detector: SharedRaces, offset: int) -> None:
        """`offset` is that of the mbarrier in its block's shared memory."""
        self.detector, self.offset = detector, offset
        self._ended = False
        self._seen: dict[int, int] = {}  # by warp: when it last saw that the last phase had ended
        self._arrivals: list[_Arrival] = []
        self._last_arrivals: list[_Arrival] = []
        self._bytes_expected = False
        self._last: Instruction | None = None

    def see(self, warps: list[int]) -> None:
        """Threads of these warps see that the last phase has ended."""
        self._seen.update(dict.fromkeys(warps, self.detector.order.now))

    def arrive(self, warp: int, lane: int | None, time: int, ins: Instruction) -> None:
        """A lane, or a whole warp, arrives."""
        self._arrivals.append(_Arrival(warp, SEVERAL if lane is None else lane, time))
        self._last = ins

    def expect_bytes(self) -> None:
        """The current phase waits for bytes of tensor copies as well."""
        self._bytes_expected = True

    def require_end(self, thread: int, ins: Instruction) -> None:
        """A thread adds to the phase that lasts."""
        if self._ended and not self._knows_end(thread):
            self.detector.report(
                ins,
                f"{self.detector.actors.name(thread)} of block {self.detector.actors.block_of(thread)} arrives at the "
                f"mbarrier at byte {self.offset} and does not know that its last phase has ended",
            )

    def _knows_end(self, thread: int) -> bool:
        order = self.detector.order
        warp, columns = thread // WARP, order.threads.cluster_warps
        if warp in self._seen or any(self._met(other, time) for other, time in self._seen.items()):
            return True
        knowledge = order.known_to(thread)
        if any(knowledge.tells_of(other % columns, time) for other, time in self._seen.items()):
            return True
        return bool(self._last_arrivals) and all(self._knows(thread, arrival) for arrival in self._last_arrivals)

    def _knows(self, thread: int, arrival: _Arrival) -> bool:
        order, column = self.detector.order, arrival.warp % self.detector.order.threads.cluster_warps
        one = [np.array([x]) for x in (thread, column, arrival.lane, arrival.time)]
        return self._met(arrival.warp, arrival.time) or not order.unordered(*one).any()

    def _met(self, warp: int, time: int) -> bool:
        """Whether a barrier of the block has come since."""
        order = self.detector.order
        return bool(time <= order.block_floor[warp // order.threads.block_warps])

    def end(self, told: tuple[Knowledge, ...]) -> None:
        """The phase ends; `told` is what those who arrived handed over."""
        columns, arrived = self.detector.order.threads.cluster_warps, {arrival.warp for arrival in self._arrivals}
        for warp, time in self._seen.items() if self._last else ():
            known = any(knowledge.tells_of(warp % columns, time) for knowledge in told)
            if not known and warp not in arrived and not self._met(warp, time):
                assert self._last is not None
                self.detector.report(
                    self._last,
                    f"{self.detector.actors.name(warp * WARP)} of block {self.detector.actors.block_of(warp * WARP)} "
                    f"may still wait for a phase of the mbarrier at byte {self.offset} when the next one ends",
                )
        self._seen.clear()
        self._last_arrivals, self._arrivals = [] if self._bytes_expected else self._arrivals, []
        self._ended, self._bytes_expected = True, False
