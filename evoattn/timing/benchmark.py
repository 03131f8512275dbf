"""Timing on the device: one candidate alone, or the contestants of a final in turns."""

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from evoattn.model.records import Timing
from evoattn.timing.clocks import Clocks, Reading
from evoattn.timing.contestant import Contestant, ContestantFailed
from evoattn.timing.protocol import CacheMode, Protocol
from evoattn.timing.timer import Enqueue

FLUSH_FACTOR = 2
"""A cold call is preceded by writing this many times the L2's size."""
CLOCK_DROP = 0.97
"""A round of the final is run again where the SM clock falls under this share of its median over the rounds so far."""
MAX_REPEATED = 0.4
"""Share of the rounds that may be run again: a GPU that throttles all the time is timed as it is."""
FAR_BEHIND, FEW_ROUNDS = 20.0, 5
"""Whoever takes this many times the fastest in a final takes part in so many rounds only: more would say nothing."""


def l2_flush(device: torch.device) -> Enqueue:
    """A call that overwrites `FLUSH_FACTOR` times the device's L2."""
    size = torch.cuda.get_device_properties(device).L2_cache_size * FLUSH_FACTOR
    buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def flush() -> None:
        buffer.fill_(1)

    return flush


def screen(
    contestant: Contestant, protocol: Protocol, cache: CacheMode, clocks: Clocks, count: int | None = None
) -> Timing:
    """The time of one contestant alone, from `count` samples (else `protocol.samples`)."""
    samples = contestant.samples(count or protocol.samples)
    shared = _shared(protocol, cache, 1, clocks)
    return Timing(tuple(samples), shared | {"calls_per_replay": contestant.calls})


def measure(
    contestants: list[Contestant],
    protocol: Protocol,
    cache: CacheMode,
    clocks: Clocks,
    rounds: int | None = None,
    seed: int = 0,
    watch: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Timings by name, from `rounds` (else `protocol.samples`) rounds.

    Each contestant is replayed once per round, in an order shuffled by `seed`, so that drift hits all alike. A round of
    the final in which the SM clock dropped is run again (`CLOCK_DROP`, `MAX_REPEATED`). `watch` is told whose turn it
    is. Raises `ContestantFailed`."""
    wanted = rounds or protocol.samples
    order: list[Contestant] = list(contestants)
    far = FAR_BEHIND * min((c.us for c in contestants), default=0.0)
    samples: dict[str, list[float]] = {c.name: [] for c in contestants}
    watched = bool(contestants) and protocol.stage == "final" and clocks.read() is not None
    spare, repeated, done = int(MAX_REPEATED * wanted), 0, 0
    seen: list[float] = []
    readings: list[Reading] = []
    shuffle = random.Random(seed)
    while contestants and done < wanted:
        shuffle.shuffle(order)
        taken, slowest = {}, []
        for contestant in order:
            if protocol.stage == "final" and contestant.us > far and done >= FEW_ROUNDS:
                continue
            watch(contestant.name)
            try:
                taken[contestant.name] = contestant.sample()
            except RuntimeError as error:
                raise ContestantFailed(contestant.name, error) from error
            if watched and (reading := clocks.read()):
                slowest.append(reading.sm_mhz)
                readings.append(reading)
        if slowest:
            seen.append(min(slowest))
            if repeated < spare and seen[-1] < CLOCK_DROP * median(seen):
                repeated += 1
                continue
        done += 1
        for name, sample in taken.items():
            samples[name].append(sample)
    shared = _shared(protocol, cache, len(contestants), clocks)
    if watched:
        shared |= {"rounds_repeated": repeated, "sm_mhz": [min(seen), max(seen)]} | _ranges(readings)
    return {c.name: Timing(tuple(samples[c.name]), shared | {"calls_per_replay": c.calls}) for c in contestants}


def _shared(protocol: Protocol, cache: CacheMode, contestants: int, clocks: Clocks) -> dict[str, Any]:
    """What the record of a timing says of all who were timed together."""
    return {
        "stage": protocol.stage,
        "cache": cache,
        "contestants": contestants,
        "run": f"{time.time_ns():x}",
        "timer": "graph replay, CUDA events",
        "clocks": clocks.record(),
    }


def _ranges(readings: list[Reading]) -> dict[str, Any]:
    """Least and most of what was read in the rounds of a final."""
    throttled = sorted({reason for reading in readings for reason in reading.throttled_by})
    return {
        "power_w": [min(r.power_w for r in readings), max(r.power_w for r in readings)],
        "temperature_c": [min(r.temperature_c for r in readings), max(r.temperature_c for r in readings)],
        "throttled_by": throttled,
    }
