"""One of those who are timed: a CUDA graph of calls, how many of them, and a sample of their time; and whether it does
the same work when it is timed."""

from collections.abc import Collection, Sequence
from math import ceil

import torch

from evoattn.correctness.arena import Arena, bits, unwritten
from evoattn.correctness.judge import order_error
from evoattn.timing.protocol import SCREEN, CacheMode, Protocol
from evoattn.timing.timer import Enqueue, Timer


class ReplayWatch:
    """Watches the timed replays of one contestant, a kernel or a peer, and says which did wrong (`fault`).

    Restores inputs and poisons outputs before each replay; compares both after it, without synchronising.

    The comparison is bit for bit, but of outputs that are `unordered` (`Family.unordered`). Its counts stay on the
    device until `fault` reads them."""

    def __init__(self, arena: Arena, expected: dict[str, torch.Tensor] | None, unordered: Collection[str] = ()) -> None:
        """`expected`: the validated outputs for the arena's inputs, by name; None for a contestant that writes
        elsewhere."""
        self._arena, self.expected, self._unordered = arena, expected, unordered
        self._outputs = [(name, bits(out)) for name, out in arena.outputs.items()]
        flags = 2 * len(self._outputs) + len(arena.inputs)
        self._counts = torch.zeros(flags, dtype=torch.int64, device=arena.whole.device)
        self.replays = 0

    def before(self) -> None:
        self._arena.restore()
        self._arena.poison()

    def after(self) -> None:
        self.replays += 1
        if self.expected is not None:
            wrong = [self._is_wrong(name, out, self.expected[name]) for name, out in self._outputs]
            missing = [self._is_missing(self._arena.outputs[name], self.expected[name]) for name, _ in self._outputs]
            changed = [(bits(now) != bits(original)).any() for now, original in self._arena.inputs.values()]
            self._counts += torch.stack(wrong + missing + changed)

    def _is_wrong(self, name: str, out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Bool scalar on the device; `out` are the bits of the output."""
        if name not in self._unordered:
            return (out != bits(expected)).any()
        difference = (self._arena.outputs[name].float() - expected.float()).abs().max()
        return ~(difference <= order_error(expected))  # NaN is wrong

    @staticmethod
    def _is_missing(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        """Bool scalar on the device. Of a cache only new rows are written, in the validated output too."""
        return (unwritten(out) & ~unwritten(expected)).any()

    def fault(self) -> str:
        """What the replays did wrong, in one sentence; waits for them."""
        counts, outputs = self._counts.tolist(), len(self._outputs)
        wrong, missing = max(counts[:outputs]), max(counts[outputs : 2 * outputs])
        changed = max(counts[2 * outputs :])
        if changed:
            return f"{changed} of {self.replays} timed replays changed the inputs."
        if missing:
            return (
                f"{missing} of {self.replays} timed replays left outputs unwritten: "
                "the kernel does less work when it is timed."
            )
        if wrong:
            return f"{wrong} of {self.replays} timed replays left another output than the validated one."
        return ""


LAUNCH_SHARE = 0.005
"""Of a replay's time, the most that the graph's own launch may take."""
PROBE_US = 100.0
"""A replay of this length tells what a call takes: some 30 times the launch of a graph."""
PROBE_CALLS, PROBE_GROWTH, PROBE_MOST = 16, 4, 256
"""Most calls in the first graph that is tried, how much longer the next one is where it was too short, and the most in
any."""

LEAD_UNDER_US = 10_000.0
"""Before a shorter replay another one keeps the device busy, so that the CPU's part of a launch, some 15 µs, is not
timed."""


class ContestantFailed(RuntimeError):
    """A replay failed. `name` says whose; message and cause are the error that it raised."""

    def __init__(self, name: str, error: RuntimeError) -> None:
        super().__init__(str(error))
        self.name, self.error = name, error


class Contestant:
    """Work that is repeated in a graph. `capture` comes before the first `sample`."""

    def __init__(
        self, name: str, enqueue: Enqueue, timer: Timer, watch: ReplayWatch | None = None, flush: Enqueue | None = None
    ) -> None:
        """Warms up. Raises what `enqueue` raises.

        `watch`: of each sample; None where nobody looks at what the replays do. `flush`: for cold calls, queued
        before each sample. `us`: of one call with its launch on the CPU, until `probe`."""
        self.name, self.watch, self._flush, self._timer = name, watch, flush, timer
        self._enqueue = enqueue  # a graph does not keep loaded the module that its kernels come from, but this does
        enqueue()
        timer.synchronize()
        self.us = timer.elapsed_us(enqueue)
        self.calls = 0

    def probe(self) -> None:
        """From now on `us` is of one call on the device, whatever it costs on the CPU: by the replay of graphs of more
        and more calls, until one is long enough."""
        calls = max(1, min(PROBE_CALLS, int(PROBE_US / max(self.us, 1.0))))
        while True:
            self.capture(calls)
            us = min(self._replay_us() for _ in range(2)) - self._timer.launch_us
            self.us = max(us, 0.0) / calls
            if us >= PROBE_US or calls >= PROBE_MOST:
                return
            calls = min(PROBE_MOST, calls * PROBE_GROWTH)

    def capture(self, calls: int) -> None:
        """From now on a replay is `calls` calls. Raises what `enqueue` raises."""
        with self._timer.side_stream():
            self.replay = self._timer.capture([self._enqueue] * calls)
        self.calls = calls
        self.replay()
        self._timer.synchronize()

    def _replay_us(self) -> float:
        self.replay()  # keeps the device busy while the next one is queued: the CPU's part of its launch is not timed
        return self._timer.elapsed_us(self.replay)

    def samples(self, count: int) -> list[float]:
        """µs per call of `count` replays, queued one behind the other.

        The inputs are restored, the outputs poisoned and, for cold calls, the L2 is flushed right before each, outside
        the timed interval."""
        if self.calls * self.us < LEAD_UNDER_US:
            self.replay()
        waits = []
        for _ in range(count):
            if self.watch:
                self.watch.before()
            if self._flush:
                self._flush()
            waits.append(self._timer.queue(self.replay))
            if self.watch:
                self.watch.after()
        return [elapsed_us() / self.calls for elapsed_us in waits]

    def sample(self) -> float:
        """µs per call of one replay."""
        return self.samples(1)[0]


def calls_for(us: float, launch_us: float, protocol: Protocol, cache: CacheMode) -> int:
    """Calls per replay where the fastest of those who are compared takes `us` per call: so many that a replay takes
    `protocol.replay_us`, and that the launch of the graph is at most `LAUNCH_SHARE` of it. One where each call finds
    a cold L2."""
    if cache == "cold":
        return 1
    least_us = max(protocol.replay_us, launch_us / LAUNCH_SHARE)
    return max(1, ceil(least_us / max(us, least_us / protocol.most_calls)))


def calls_to_screen(us: float, best_us: float | None, launch_us: float, cache: CacheMode) -> int:
    """Calls per replay of one candidate alone, of which `us` is known with its launch on the CPU: at least as many as
    it needs if it is about as fast as the best so far.

    A short call takes mostly its launch, which says little: it may be ten times as fast on the device."""
    return calls_for(us if best_us is None else min(us, max(best_us, us / 10)), launch_us, SCREEN, cache)


def calls_for_all(contestants: Sequence[Contestant], launch_us: float, protocol: Protocol, cache: CacheMode) -> int:
    """One number of calls for those who are compared, by the fastest of them, all `probe`d."""
    return calls_for(min(c.us for c in contestants), launch_us, protocol, cache)
