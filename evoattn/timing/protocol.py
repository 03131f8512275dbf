"""How long and how often a candidate is timed; who takes part in a final, and what comes of it. Imports no torch: the
search passes these between processes."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from evoattn.families.built import BuiltKernel
from evoattn.model.records import Timing

CacheMode = Literal["warm", "cold"]
"""`warm` keeps the inputs in L2 between calls, `cold` flushes it before each."""

ENERGY = "energy_mj_per_call"
"""Key of a timing's record: millijoules of the whole board per call."""


@dataclass(frozen=True)
class Protocol:
    """`samples` replays of a graph, each of at least `replay_us` µs of the fastest contestant's work
    (`contestant.calls_for`)."""

    stage: Literal["screen", "repeat", "final"]
    samples: int
    replay_us: float
    most_calls: int = 2000
    """Per replay: each is a node of the graph, or several, that the CPU builds."""
    proves: bool = True
    """Of a final: finalists are right before they are timed and after it. False: their order alone is asked for."""
    weighs: bool = False
    """Of a final: energy is measured, a third of a second for each."""
    behind: float = math.inf
    """Of a final: who takes this many times the fastest, by its probe, has no rounds."""


SCREEN = Protocol("screen", 5, 500.0, most_calls=500)
"""Cheap, for every candidate: 3 ms of device time."""
REPEAT = Protocol("repeat", 15, 1000.0)
"""For candidates within `REPEAT_WITHIN` times the best so far."""
FINAL = Protocol("final", 25, 1000.0, weighs=True)
"""Rounds of the final: every contestant once per round, in shuffled order."""
COMPARISON = Protocol("final", 9, 700.0, most_calls=500, behind=1.5)
"""A final among many: what `evoattn.tune` keeps is proved in it."""
ORDER = Protocol("final", 5, 700.0, most_calls=500, proves=False, behind=1.5)
"""A final of kernels that passed the small cases, where nothing but their order is asked for."""
REPEAT_WITHIN = 1.05
RACE = 2
"""Samples of the race that every candidate runs before it is proved in full."""
PRUNE_BEYOND = 1.1
"""A candidate that takes this many times the best so far is not proved, and so cannot lead: it is left at that time."""
HOPELESS, HOPELESS_US = 10.0, 300.0
"""One call of this many times the best so far, and of so many µs that its launch does not count, is a candidate's
time: it has no chance, and may be very slow."""


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
