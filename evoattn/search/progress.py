"""Where a running search stands: what it counts, for those who show it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from evoattn.model.records import Trial, TrialState

_NEVER_RAN = (TrialState.INVALID_CONFIG, TrialState.DUPLICATE, TrialState.COMPILE_ERROR)


@dataclass
class Progress:
    """What the live display shows; only the search writes it."""

    created: float = field(default_factory=time.monotonic)
    started: float | None = None
    """When the budget's time began to run (`budget.Clock`); None while the workers start."""
    recorded: int = 0
    states: Counter = field(default_factory=Counter)
    compiling: int = 0
    ready: int = 0
    on_device: str = ""
    """What the GPU worker does; empty in an offline search."""
    device_seconds: float = 0.0
    """Wall time since `started` in which the GPU worker had a task."""
    best: Trial | None = None
    level_with: tuple[int, ...] = ()
    """Finalists that the final does not tell from the best (`ranking`)."""
    baselines: dict[str, float] = field(default_factory=dict)
    """Median µs by SDPA backend, from the first measurement of the study."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the end of the search: who left its final, and why."""
    stage: str = "starting workers"

    @property
    def seconds(self) -> float:
        """Of the budget, spent so far."""
        return 0.0 if self.started is None else time.monotonic() - self.started

    @property
    def starting_seconds(self) -> float:
        """Until the workers were up, before the budget's time began."""
        return (time.monotonic() if self.started is None else self.started) - self.created

    @property
    def measured(self) -> int:
        """Recorded candidates that got as far as a verdict on the device, or on the interpreter."""
        return self.recorded - sum(self.states[state] for state in _NEVER_RAN)

    @property
    def busy_share(self) -> float:
        """Part of the budget's time in which the GPU worker had a task, 0 to 1."""
        return self.device_seconds / self.seconds if self.seconds else 0.0

    @property
    def candidates_per_second(self) -> float:
        return self.recorded / self.seconds if self.seconds else 0.0
