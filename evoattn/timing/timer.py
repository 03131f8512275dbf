"""CUDA events and graphs: how long work takes on the device, and what a graph's own launch costs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from evoattn.model import collector

Enqueue = Callable[[], object]
"""Puts work on the current stream."""

LEAD_BYTES = 1 << 28
"""Written before the launch of a graph is timed, so that the device is busy while the CPU queues it."""
LAUNCHES = 10
"""Launches of which the least counts."""


class Timer:
    """CUDA events and graphs on the current device."""

    def __init__(
        self,
        make_event: Callable[..., torch.cuda.Event] = torch.cuda.Event,
        make_graph: Callable[[], torch.cuda.CUDAGraph] = torch.cuda.CUDAGraph,
    ) -> None:
        self._make_event, self._make_graph = make_event, make_graph

    def queue(self, work: Enqueue) -> Callable[[], float]:
        """Queue `work`; the function that comes back waits for it, and gives µs from before it to after it."""
        start, end = self._make_event(enable_timing=True), self._make_event(enable_timing=True)
        start.record()
        work()
        end.record()

        def elapsed_us() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e3

        return elapsed_us

    def elapsed_us(self, work: Enqueue) -> float:
        """Device time from before `work` to after it; waits for it."""
        return self.queue(work)()

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Capture needs a stream other than the default one. The device is idle when it starts and when it ends."""
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()

    def capture(self, calls: list[Enqueue]) -> Enqueue:
        """A call that replays `calls` as one graph, and keeps the graph; only on a `side_stream`, or another stream
        than the default one. Raises what `calls` raise."""
        graph = self._make_graph()
        with collector.paused():  # garbage may be modules, which cannot be unloaded during a capture
            graph.capture_begin()  # torch.cuda.graph() would collect garbage first, which costs more than the timing
            try:
                for call in calls:
                    call()
            finally:
                graph.capture_end()
        return graph.replay

    @cached_property
    def launch_us(self) -> float:
        """What a replay takes beside its calls: the time of a graph of one write of four bytes, which is a little more.

        The device is busy while the replay is queued, as in `Contestant.sample`."""
        lead = torch.empty(LEAD_BYTES, dtype=torch.uint8, device="cuda")
        with self.side_stream():
            replay = self.capture([lead[:4].zero_])
        replay()
        times = []
        for _ in range(LAUNCHES):
            lead.zero_()
            times.append(self.elapsed_us(replay))
        return min(times)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


GRAPH_UNDER_US = 300.0
"""Calls shorter than this are timed in a graph: the CPU cannot launch them one by one as fast as the GPU runs them."""
FIRST_CALLS, LATE_UNDER_US = 3, 10_000.0
"""Calls of which the least is the first estimate, two of long ones: one alone may be a launch that the CPU was late
with, by up to some ms. Of calls that take longer one is enough."""
GRAPH_US, GRAPH_CALLS = 700.0, (10, 60)
DIRECT_US, DIRECT_CALLS = 1200.0, (2, 10)

Call = Callable[[], None]


@dataclass(frozen=True)
class Repeated:
    """Work that makes `calls` calls; `kept` is the call, as a graph does not keep loaded the module of its kernels."""

    work: Enqueue
    calls: int
    kept: object = None


class Clock:
    """One pair of events."""

    def __init__(self) -> None:
        make_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        self._events = [make_event(enable_timing=True) for _ in range(2)]

    def elapsed(self, work: Enqueue) -> float:
        """µs that the GPU takes for the work; waits for it."""
        start, end = self._events
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def first(self, enqueue: Call) -> float:
        """An estimate of one call in µs, after a call that loads the kernel."""
        enqueue()
        once = self.elapsed(enqueue)
        more = 0 if once > LATE_UNDER_US else 1 if once > 2 * GRAPH_UNDER_US else FIRST_CALLS - 1
        return min([once, *(self.elapsed(enqueue) for _ in range(more))])

    def a_call(self, repeated: Repeated) -> float:
        """µs per call, the mean over the work."""
        return self.elapsed(repeated.work) / repeated.calls


def repeat(enqueue: Call, first_us: float, timer: Timer) -> Repeated:
    """Calls enough to be timed, by what the first one took: a graph of short calls, a plain loop over long ones. Not on
    the default stream, where no graph can be captured."""
    if first_us >= GRAPH_UNDER_US:
        low, high = DIRECT_CALLS
        calls = max(low, min(high, int(DIRECT_US / first_us)))

        def loop() -> None:
            for _ in range(calls):
                enqueue()

        return Repeated(loop, calls)
    low, high = GRAPH_CALLS
    calls = max(low, min(high, int(GRAPH_US / max(first_us / 2, 3.0))))
    replay = timer.capture([enqueue] * calls)
    replay()
    return Repeated(replay, calls, enqueue)
