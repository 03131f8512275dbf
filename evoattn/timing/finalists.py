"""Who takes part in a final, and what comes of it. Imports no torch: the search passes these between processes."""

from typing import NamedTuple

from evoattn.families.built import BuiltKernel
from evoattn.model.records import Timing

Finalists = dict[str, BuiltKernel]
"""Our kernels in a final, by name; a search uses the trial's number."""


class FinalResult(NamedTuple):
    """The result of a final, or of one try at it."""

    timings: dict[str, Timing]
    """By finalist and peer. A finalist that failed has a timing without samples (`Timing.out`), one that was left far
    behind unproved that of its probe, and the word `out`. `disqualified` in a timing's protocol is the sentence by
    which a finalist proved wrong. A peer's protocol has its package and `version`."""
    refusals: dict[str, str]
    """By peer: why it has no timing."""
    complete: bool = True
    """False: the process is lost to those named here; the others need another try in a fresh one."""

    @property
    def right_us(self) -> dict[str, float]:
        """Median µs of all who have a time and proved right, or were not asked to."""
        return {
            n: t.median_us
            for n, t in self.timings.items()
            if t.samples_us and not t.disqualified and "out" not in t.protocol
        }
