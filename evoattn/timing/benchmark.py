"""Timing on the device: CUDA-graph replay, warm or cold L2, contestants interleaved, the output of every replay
checked."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from evoattn.correctness.arena import UNWRITTEN, Arena, bits
from evoattn.model.records import Timing
from evoattn.timing.clocks import Clocks
from evoattn.timing.protocol import CacheMode, Protocol

Enqueue = Callable[[], object]
"""Puts work on the current stream."""

FLUSH_FACTOR = 2
"""A cold call is preceded by writing this many times the L2's size."""
CLOCK_DROP = 0.97
"""A round of the final is run again where the SM clock falls under this share of its median over the rounds so far."""
MAX_REPEATED = 0.4
"""Share of the rounds that may be run again: a GPU that throttles all the time is timed as it is."""


class Timer:
    """CUDA events and graphs on the current device."""

    def __init__(
        self,
        make_event: Callable[..., torch.cuda.Event] = torch.cuda.Event,
        make_graph: Callable[[], torch.cuda.CUDAGraph] = torch.cuda.CUDAGraph,
    ) -> None:
        self._start, self._end = make_event(enable_timing=True), make_event(enable_timing=True)
        self._make_graph = make_graph

    def elapsed_us(self, work: Enqueue) -> float:
        """Device time from before `work` to after it; waits for it."""
        self._start.record()
        work()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Capture needs a stream other than the default one. The device is idle when it starts and when it ends."""
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def capture(self, calls: list[Enqueue]) -> Enqueue:
        """A call that replays `calls` as one graph; only on a `side_stream`. Raises what `calls` raise."""
        graph, collects = self._make_graph(), gc.isenabled()
        gc.disable()  # garbage may be modules, which cannot be unloaded during a capture
        try:
            graph.capture_begin()  # torch.cuda.graph() would collect garbage first, which costs more than the timing
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        return graph.replay

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class Witness:
    """Restores inputs and poisons outputs before each replay; compares both after it, without synchronising.

    The comparison is bit for bit; its counts stay on the device until `fault` reads them.
    """

    def __init__(self, arena: Arena, expected: dict[str, torch.Tensor] | None) -> None:
        """`expected`: the validated outputs for the arena's inputs, by name; None for a contestant that writes
        elsewhere."""
        self._arena, self._expected = arena, expected
        self._counts = torch.zeros(3, dtype=torch.int64, device=arena.whole.device)
        self.replays = 0

    def before(self) -> None:
        self._arena.restore()
        self._arena.poison()

    def after(self) -> None:
        self.replays += 1
        if self._expected is not None:
            outputs = {name: bits(out) for name, out in self._arena.outputs.items()}
            wrong = torch.stack([(out != bits(self._expected[name])).any() for name, out in outputs.items()]).any()
            unwritten = torch.stack([(out == UNWRITTEN).any() for out in outputs.values()]).any()
            changed = torch.stack(self._arena.changed_inputs()).sum()
            self._counts += torch.stack([wrong, unwritten, changed > 0])

    def fault(self) -> str:
        """What the replays did wrong, in one sentence; waits for them."""
        wrong, unwritten, changed = self._counts.tolist()
        if changed:
            return f"{changed} of {self.replays} timed replays changed the inputs."
        if unwritten:
            return (
                f"{unwritten} of {self.replays} timed replays left outputs unwritten: "
                "the kernel does less work when it is timed."
            )
        if wrong:
            return f"{wrong} of {self.replays} timed replays left another output than the validated one."
        return ""


class ContestantFailed(RuntimeError):
    """A replay failed. `name` says whose; message and cause are the error that it raised."""

    def __init__(self, name: str, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.name, self.error = name, error


class Contestant:
    """A captured graph of `calls` calls, ready to be replayed and timed."""

    def __init__(
        self,
        name: str,
        enqueue: Enqueue,
        protocol: Protocol,
        cache: CacheMode,
        timer: Timer,
        witness: Witness,
        flush: Enqueue | None = None,
    ) -> None:
        """Warms up, estimates the time of one call and captures the graph. Raises what `enqueue` raises.

        `estimate_us`: of one call, launch overhead included.
        """
        self.name, self.witness, self._flush, self._timer = name, witness, flush, timer
        self._enqueue = enqueue  # a graph does not keep loaded the module that its kernels come from, but this does
        with timer.side_stream():
            enqueue()
            self.estimate_us = min(timer.elapsed_us(enqueue) for _ in range(2))
            self.calls = (
                1
                if cache == "cold"
                else max(1, min(protocol.max_calls, int(protocol.replay_us / max(self.estimate_us, 1.0))))
            )
            self.replay = timer.capture([enqueue] * self.calls)
        self.replay()
        timer.synchronize()

    def sample(self) -> float:
        """µs per call of one replay. Cold: the L2 is flushed first, outside the timed interval but queued right before
        it."""
        self.witness.before()
        if self._flush:
            self._flush()
        elapsed = self._timer.elapsed_us(self.replay) / self.calls
        self.witness.after()
        return elapsed


def l2_flush(device: torch.device) -> Enqueue:
    """A call that overwrites `FLUSH_FACTOR` times the device's L2."""
    size = torch.cuda.get_device_properties(device).L2_cache_size * FLUSH_FACTOR
    buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def flush() -> None:
        buffer.fill_(1)

    return flush


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
    is. Raises `ContestantFailed`.
    """
    run, wanted = f"{time.time_ns():x}", rounds or protocol.samples
    order: list[Contestant] = list(contestants)
    samples: dict[str, list[float]] = {c.name: [] for c in contestants}
    watched = protocol.stage == "final" and clocks.read() is not None
    spare, repeated = int(MAX_REPEATED * wanted), 0
    seen: list[float] = []
    shuffle = random.Random(seed)
    while contestants and len(samples[contestants[0].name]) < wanted:
        shuffle.shuffle(order)
        taken, slowest = {}, []
        for contestant in order:
            watch(contestant.name)
            try:
                taken[contestant.name] = contestant.sample()
            except RuntimeError as error:
                raise ContestantFailed(contestant.name, error) from error
            if watched and (reading := clocks.read()):
                slowest.append(reading.sm_mhz)
        if slowest:
            seen.append(min(slowest))
            if repeated < spare and seen[-1] < CLOCK_DROP * median(seen):
                repeated += 1
                continue
        for name, sample in taken.items():
            samples[name].append(sample)
    shared: dict[str, Any] = {
        "stage": protocol.stage,
        "cache": cache,
        "contestants": len(contestants),
        "run": run,
        "timer": "graph replay, CUDA events",
        "clocks": clocks.record(),
    }
    if watched:
        shared |= {"rounds_repeated": repeated, "sm_mhz": [min(seen), max(seen)]}
    return {c.name: Timing(tuple(samples[c.name]), shared | {"calls_per_replay": c.calls}) for c in contestants}
