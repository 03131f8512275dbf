"""Times of calls by CUDA events on the current stream, many calls at once."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from evoattn.timing.timer import Enqueue, Timer

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
