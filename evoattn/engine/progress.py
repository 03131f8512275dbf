"""Where a running search stands: what it counts, for those who show it."""

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
    states: Counter[TrialState] = field(default_factory=Counter)
    compiling: int = 0
    ready: int = 0
    """Compiled candidates that wait for the device."""
    on_device: str = ""
    """What the GPU worker does; empty in an offline search."""
    device_seconds: float = 0.0
    """Wall time since `started` in which a GPU worker had a task, summed over the `boards`."""
    boards: int = 1
    """GPUs that are searched on."""
    speeds: dict[str, float] = field(default_factory=dict)
    """By board, in a search on several: how much longer it takes for the reference kernel than that kernel's first
    time."""
    best: Trial | None = None
    improvements: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, value) each time that this run found a better trial: `seconds` as in `Progress.seconds`, the value as
    in `Trial.value`."""
    tied_with: tuple[int, ...] = ()
    """Numbers of the finalists that the final does not tell from the best (`evoattn.timing.ranking`)."""
    peers: dict[str, float] = field(default_factory=dict)
    """Median µs by peer, from its latest measurement in the study."""
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
    def since_improvement(self) -> float | None:
        """Seconds since this run last found a better trial; None before the first."""
        return self.seconds - self.improvements[-1][0] if self.improvements else None

    @property
    def best_value(self) -> float | None:
        """`Trial.value` of the best so far."""
        return self.best.value if self.best else None

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """(name, median µs) of the fastest peer; None before the peers were measured, and in an offline search."""
        return min(self.peers.items(), key=lambda peer: peer[1]) if self.peers else None

    @property
    def ratio(self) -> float | None:
        """The best median over the fastest peer's: under 1 the search is ahead. None where one of them is missing."""
        if self.best is None or self.best.timing is None or self.best_peer is None:
            return None
        return self.best.timing.median_us / self.best_peer[1]

    @property
    def measured(self) -> int:
        """Recorded candidates that got as far as a verdict on the device, or on the interpreter."""
        return self.recorded - sum(self.states[state] for state in _NEVER_RAN)

    @property
    def busy_share(self) -> float:
        """Part of the budget's time in which a GPU worker had a task, 0 to 1, the mean over the boards."""
        return self.device_seconds / self.seconds / self.boards if self.seconds else 0.0

    @property
    def candidates_per_second(self) -> float:
        return self.recorded / self.seconds if self.seconds else 0.0

    def take(self, trial: Trial) -> bool:
        """Whether `trial` is better than all before it, which makes it `best`."""
        value, best = trial.value, self.best_value
        better = value is not None and (best is None or value < best)
        if better:
            self.best = trial
        return better
