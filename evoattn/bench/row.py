"""One problem's line of the bench table, and what is said beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evoattn.model.records import Timing
from evoattn.timing.protocol import ENERGY


@dataclass(frozen=True)
class Time:
    """µs per call: the median, and the 10th and 90th percentiles of the samples."""

    median_us: float
    p10_us: float
    p90_us: float
    energy_mj: float | None = None
    """Millijoules of the whole board per call; None where that was not measured."""

    @staticmethod
    def of(timing: Timing) -> Time:
        """Of a timing that has samples."""
        low, high = timing.quantile_us(0.1), timing.quantile_us(0.9)
        return Time(timing.median_us, low, high, timing.protocol.get(ENERGY))


@dataclass
class Row:
    """Our best kernel that is right, in the final too (None with a note that says why), and every peer's time or
    refusal."""

    problem: dict[str, Any]
    describe: str
    ours: Time | None = None
    tflops: float | None = None
    trial: int | None = None
    family: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    peers: dict[str, Time] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """Our median over the best peer's: under 1 we are faster. None where one of them is missing."""
        if self.ours is None or not self.peers:
            return None
        return self.ours.median_us / min(time.median_us for time in self.peers.values())


MAX_COLUMNS = 160
"""Of a printed line; the JSON holds the whole note."""


class Note(NamedTuple):
    """`subject`: the trial, file or problem that the sentence is about."""

    subject: str
    sentence: str


def grouped(notes: list[Note]) -> list[str]:
    """A line a sentence, in the order of first mention: its first subject, how many more there are, and the
    sentence."""
    subjects: dict[str, list[str]] = {}
    for subject, sentence in notes:
        subjects.setdefault(" ".join(sentence.split()), []).append(subject)
    return [
        f"{named[0]}{f' and {len(named) - 1} more' if len(named) > 1 else ''}: {sentence}"
        for sentence, named in subjects.items()
    ]


def shortened(line: str) -> str:
    """The line, cut to `MAX_COLUMNS` columns."""
    return line if len(line) <= MAX_COLUMNS else line[: MAX_COLUMNS - 1] + "…"
