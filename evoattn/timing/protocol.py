"""How long and how often a candidate is timed. Imports no torch: the search names a protocol, the GPU worker follows
it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CacheMode = Literal["warm", "cold"]
"""`warm` keeps the inputs in L2 between calls, `cold` flushes it before each."""


@dataclass(frozen=True)
class Protocol:
    """`samples` replays of a graph, each of about `replay_us` µs of work (at most `max_calls` calls)."""

    stage: Literal["screen", "repeat", "final"]
    samples: int
    replay_us: float
    max_calls: int = 200


SCREEN = Protocol("screen", 5, 500.0)
"""Cheap, for every candidate: 2.5 ms of device time."""
REPEAT = Protocol("repeat", 15, 1000.0)
"""For candidates within `REPEAT_WITHIN` times the best so far."""
FINAL = Protocol("final", 25, 1000.0)
"""Rounds of the final: every contestant once per round, in shuffled order."""
REPEAT_WITHIN = 1.05
HOPELESS = 10.0
"""A candidate whose first calls take this many times the best so far gets one sample: it has no chance, and may be very
slow."""
