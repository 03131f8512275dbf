"""Energy of a call: what the board's own counter says over many replays."""

import time
from collections.abc import Callable
from math import ceil

from evoattn.timing.contestant import Contestant

SECONDS = 0.25
"""Of replays. NVML's counter moves some ten to fifty times per second."""
BETWEEN_READINGS_US = 4000.0
"""Replays of this length are queued between two readings of the counter, each of which takes the CPU some µs."""
STUCK_SECONDS = 1.0
"""A counter that does not move for so long does not count."""


def energy_per_call(
    contestant: Contestant,
    read_mj: Callable[[], int | None],
    synchronize: Callable[[], None],
    now: Callable[[], float] = time.monotonic,
) -> float | None:
    """Millijoules of the whole board per call, at the clocks and the power that many calls in a row lead to.

    `read_mj` reads the counter in mJ (`Clocks.energy_mj`), None where there is none. The interval begins and ends where
    the counter moves, so that its steps do not matter. None without a counter, or where it does not move."""
    first, began = read_mj(), now()
    if first is None:
        return None
    replays = max(1, ceil(BETWEEN_READINGS_US / max(contestant.us * contestant.calls, 1.0)))

    def run_and_read() -> int | None:
        for _ in range(replays):
            contestant.replay()
        synchronize()
        return read_mj()

    start = first
    while start == first and now() - began < STUCK_SECONDS:
        start = run_and_read() or first
    if start == first:
        return None
    runs, last, runs_until_last, began = 0, start, 0, now()
    while now() - began < SECONDS or (not runs_until_last and now() - began < STUCK_SECONDS):
        runs += 1
        reading = run_and_read()
        if reading is not None and reading != last:
            last, runs_until_last = reading, runs
    return (last - start) / (runs_until_last * replays * contestant.calls) if runs_until_last else None
