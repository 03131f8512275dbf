"""The speed of each board, by a reference kernel that all of them time now and then."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

from evoattn.families.built import BuiltKernel
from evoattn.model.records import Evaluation

EVERY = 64
"""Candidates of a board between two times of the reference: 20 ms in every two seconds or so."""
LATEST = 5
"""Times of the reference, the latest of a board, whose median is the board's: one alone is off by 0.2 % or so."""


@dataclass(frozen=True)
class Reference:
    """A kernel known to be right, and its time in the study, to which the boards' times of it are compared."""

    kernel: BuiltKernel
    trial: int
    median_us: float


class Scale:
    """Turns times of several boards into times that can be ranked.

    A candidate's time divided by the reference's on the same board is a ratio without a board. Times the reference's
    first time it is in µs again: those of the board that timed the reference first."""

    def __init__(self, boards: Iterable[str]) -> None:
        self.boards = tuple(boards)
        self.reference: Reference | None = None
        self._times: dict[str, deque[float]] = {}
        self._since: dict[str, int] = {}

    def refer_to(self, reference: Reference, board: str | None = None) -> None:
        """Compare to this kernel from now on. `board`: the one whose time of it `reference` has, if one just timed
        it."""
        self.reference = reference
        self._times = {name: deque(maxlen=LATEST) for name in self.boards}
        self._since = dict.fromkeys(self.boards, 0)
        if board is not None:
            self.took(board, reference.median_us)

    def due(self, board: str) -> bool:
        """Whether the board is to time the reference before its next candidate."""
        return self.reference is not None and (not self._times[board] or self._since[board] >= EVERY)

    def took(self, board: str, median_us: float) -> None:
        """The board has timed the reference."""
        self._times[board].append(median_us)
        self._since[board] = 0

    def factor(self, board: str) -> float:
        """How much longer this board takes than the reference's time in the study; 1 as long as that is unknown."""
        if self.reference is None or not self._times[board]:
            return 1.0
        return median(self._times[board]) / self.reference.median_us

    def mark(self, board: str, evaluation: Evaluation) -> Evaluation:
        """The evaluation of a candidate on `board`, with board and factor in each of its timings."""
        if self.reference is not None:
            self._since[board] += 1
        words: dict[str, object] = {"board": board, "board_factor": self.factor(board)}
        if self.reference is not None:
            words["reference"] = self.reference.trial
        timings = (replace(t, protocol=t.protocol | words) for t in evaluation.timings)
        return replace(evaluation, timings=tuple(timings))

    @property
    def speeds(self) -> dict[str, float]:
        """By board: its factor. Empty before the reference is timed."""
        return {} if self.reference is None else {b: self.factor(b) for b in self.boards if self._times[b]}
