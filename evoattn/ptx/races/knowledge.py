"""What somebody knows of the accesses of others: a row of vector clocks, with single lanes apart where they differ."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from evoattn.ptx.program.arrays import Numbers


@dataclass
class Knowledge:
    """Columns are those of `HappensBefore.clock`."""

    known: Numbers
    """`[column]`: all that every lane of that warp, or that agent, has done up to then."""
    lanes: dict[tuple[int, int], int] = field(default_factory=dict)
    """By column and lane: what that lane alone has done, up to a later time."""

    @classmethod
    def of_nothing(cls, columns: int) -> Knowledge:
        """Of nobody's accesses, for that many columns."""
        return cls(np.zeros(columns, np.int64))

    def join(self, other: Knowledge) -> None:
        """Learn what another knows."""
        np.maximum(self.known, other.known, out=self.known)
        join_lanes(self.lanes, other.lanes)

    def covers(self, column: int, lane: int, time: int) -> bool:
        """Whether it holds what a lane of a column did at a time."""
        return bool(time <= self.known[column]) or time <= self.lanes.get((column, lane), 0)

    def tells_of(self, column: int, time: int) -> bool:
        """Whether it holds what some thread of a column did at a time."""
        return bool(time <= self.known[column]) or any(
            time <= at for (other, _), at in self.lanes.items() if other == column
        )


def join_lanes(lanes: dict[tuple[int, int], int], others: dict[tuple[int, int], int]) -> None:
    """The later of both for each lane, into `lanes`."""
    for key, time in others.items():
        if time > lanes.get(key, 0):
            lanes[key] = time
