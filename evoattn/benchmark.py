"""The timing protocol: CUDA-graph replay, warm or cold L2, several contestants interleaved."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from evoattn.trial import Timing

CacheMode = Literal["warm", "cold"]
Enqueue = Callable[[], None]


@dataclass(frozen=True)
class Protocol:
    """How long and how often: `samples` replays of a graph, each of about `replay_us` µs of work (at most `max_calls` calls)."""

    stage: Literal["screen", "repeat", "final"]
    samples: int
    replay_us: float
    max_calls: int = 200


SCREEN = Protocol("screen", 5, 500.0)
"""Cheap, for every candidate: 2.5 ms of device time."""
REPEAT = Protocol("repeat", 15, 1000.0)
"""For those within `REPEAT_WITHIN` of the best so far."""
FINAL = Protocol("final", 25, 1000.0)
"""Rounds of the final, every contestant once a round in shuffled order."""
REPEAT_WITHIN = 1.05
HOPELESS = 10.0
"""A candidate whose first calls take this many times the best so far gets one sample: it has no chance, and may be very slow."""
FLUSH_FACTOR = 2
"""A cold call is preceded by writing this many times the L2's size."""


class Contestant:
    """A captured graph of `calls` calls, ready to be replayed and timed."""

    def __init__(self, name: str, enqueue: Enqueue, protocol: Protocol, cache: CacheMode, flush: Enqueue | None = None) -> None:
        """Warms up, estimates the time of one call (`estimate_us`, launch overhead included) and captures the graph. Raises what `enqueue` raises."""
        self.name, self._flush = name, flush
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):               # capture needs a stream other than the default one
            enqueue()
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self.estimate_us = min(self._elapsed_us(enqueue) for _ in range(2))
            self.calls = 1 if cache == "cold" else max(1, min(protocol.max_calls, int(protocol.replay_us / max(self.estimate_us, 1.0))))
            self.graph = torch.cuda.CUDAGraph()
            self.graph.capture_begin()                # torch.cuda.graph() would collect garbage first, which costs more than the timing
            try:
                for _ in range(self.calls):
                    enqueue()
            finally:
                self.graph.capture_end()
        stream.synchronize()
        self.graph.replay()
        torch.cuda.synchronize()

    def _elapsed_us(self, work: Enqueue) -> float:
        start, end = self._events
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def sample(self) -> float:
        """µs a call of one replay. Cold: the L2 is flushed first, outside the timed interval but queued right before it."""
        if self._flush:
            self._flush()
        return self._elapsed_us(self.graph.replay) / self.calls


def l2_flush(device: torch.device) -> Enqueue:
    """A call that overwrites `FLUSH_FACTOR` times the device's L2."""
    size = torch.cuda.get_device_properties(device).L2_cache_size * FLUSH_FACTOR
    buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def flush() -> None:
        buffer.fill_(1)

    return flush


def measure(contestants: list[Contestant], protocol: Protocol, cache: CacheMode, rounds: int | None = None, seed: int = 0) -> dict[str, Timing]:
    """`rounds` (else `protocol.samples`) rounds; each contestant is replayed once a round, in an order shuffled by `seed`, so that drift hits all alike."""
    run = f"{time.time_ns():x}"
    order, samples = list(contestants), {c.name: [] for c in contestants}
    shuffle = random.Random(seed)
    for _ in range(rounds or protocol.samples):
        shuffle.shuffle(order)
        for contestant in order:
            samples[contestant.name].append(contestant.sample())
    return {
        c.name: Timing(
            tuple(samples[c.name]),
            {
                "stage": protocol.stage, "cache": cache, "calls_per_replay": c.calls, "contestants": len(contestants), "run": run,
                "timer": "graph replay, CUDA events",
            },
        )
        for c in contestants
    }
