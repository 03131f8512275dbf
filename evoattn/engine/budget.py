"""How long a search may go on: a time or a count of trials."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from evoattn.model.errors import WrongUse

_UNITS = {"s": 1, "m": 60, "h": 3600}


RESERVE_SHARE, RESERVE_LEAST, RESERVE_MOST = 0.05, 5.0, 45.0
"""Part of a time budget kept for the final, and its bounds in seconds: the final of seed_h100 took 4.8 s
on an H100."""


class BudgetError(WrongUse):
    """A budget that cannot be read: its message is one sentence."""


@dataclass(frozen=True)
class Budget:
    """One of `seconds` and `trials` is set."""

    seconds: float | None = None
    trials: int | None = None


def parse_budget(text: str) -> Budget:
    """`90s`, `30m`, `2h` (fractions allowed) or `500trials`. Raises `BudgetError`."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?) ?([smh])|(\d{1,9}) ?trials", str(text).strip())
    if not match or float(match[1] or match[3]) == 0:
        raise BudgetError(
            f"The budget {text!r} is neither a time over 0 such as 90s, 30m or 2h nor a count over 0 such as 500trials."
        )
    return Budget(trials=int(match[3])) if match[3] else Budget(seconds=float(match[1]) * _UNITS[match[2]])


def reserve_of(budget: Budget) -> float:
    """Seconds of a time budget to keep for the final; 0 for a count of trials."""
    if budget.seconds is None:
        return 0.0
    return min(RESERVE_MOST, max(RESERVE_LEAST, RESERVE_SHARE * budget.seconds))


class Clock:
    """A budget as it is spent. Its time runs from `start`: until the workers are up no candidate can be measured."""

    def __init__(self, budget: Budget, reserve: float = 0.0, now: Callable[[], float] = time.monotonic) -> None:
        """`reserve`: seconds of a time budget to leave for what comes after the search, at most half of it."""
        self._budget, self._now = budget, now
        self._seconds = None if budget.seconds is None else max(budget.seconds - reserve, 0.5 * budget.seconds)
        self.started: float | None = None
        """When, by `time.monotonic`."""

    def start(self) -> None:
        """Let the time run."""
        self.started = self._now()

    def spent(self, recorded: int) -> bool:
        """Whether the time is over, or `recorded` trials are all that were wanted."""
        if self._budget.trials is not None:
            return recorded >= self._budget.trials
        if self.started is None or self._seconds is None:
            return False
        return self._now() >= self.started + self._seconds
