"""Times one candidate and checks the timed launches' outputs: a check before the timing says nothing about the
timing."""

import time
from dataclasses import dataclass

import torch

from evoattn.backends.base import QueuedBackend
from evoattn.correctness.arena import POISON_BYTE, Arena
from evoattn.correctness.cases import Case
from evoattn.correctness.judge import apart, dirty_sentence, judge
from evoattn.correctness.reference import first
from evoattn.correctness.validate import OUTSIDE
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CheckResult, Timing
from evoattn.timing.contestant import Contestant, ReplayWatch
from evoattn.timing.protocol import CacheMode
from evoattn.timing.timer import Enqueue, Timer

BACK_TO_BACK = 4
"""Launches of a graph in which each writes outputs of its own: a kernel that skips work in a graph of 60 skips it
here."""
IMPLAUSIBLE_SHARE = 0.95
"""A time under this share of the roofline's least time is a broken measurement; the rest allows for the table's
clock."""


def why_implausible(timing: Timing, problem: AttentionProblem, gpu: GpuSpec) -> str:
    """One sentence if no such GPU can compute `problem` in that time, else an empty string."""
    floor = gpu.floor_us(problem.flops, problem.bytes, problem.dtype)
    if timing.median_us >= IMPLAUSIBLE_SHARE * floor:
        return ""
    return (
        f"{timing.median_us:.2f} µs is under the {floor:.2f} µs that the {gpu.product}'s peak rates allow: "
        "a broken measurement."
    )


@dataclass(frozen=True)
class TimingSetup:
    """What every candidate of a problem is timed with; `fresh` are other inputs of the same shape as `own`."""

    backend: QueuedBackend
    timer: Timer
    cache: CacheMode
    own: Case
    fresh: Case
    flush: Enqueue | None


class TimedRun:
    """A candidate over the buffers of `arena`, which holds the setup's own inputs.

    `outputs` are the validated ones for these inputs, by name; None where the validation saw a fault."""

    def __init__(
        self, setup: TimingSetup, kernel: BuiltKernel, outputs: dict[str, torch.Tensor] | None, arena: Arena
    ) -> None:
        """`arena` is shared among the contestants of a final, scratch buffers are not. Raises what `Arena` raises."""
        self._setup, self._kernel, self._outputs, self._arena = setup, kernel, outputs, arena
        self._launches = kernel.launches(setup.own.problem)
        self._unordered = kernel.unordered(setup.own.problem)
        self._scratch = Arena({}, {}, kernel.workspace(setup.own.problem), setup.backend.device)
        self._scratch.arm()
        self._watches: list[ReplayWatch] = []

    def _prepare(self, **others: torch.Tensor) -> Enqueue:
        return self._setup.backend.prepare(
            self._kernel.compiled, self._launches, self._arena.buffers | self._scratch.buffers | others
        )

    def contestant(self, name: str) -> Contestant:
        """Warmed up and measured; its `capture` comes next. Raises `LaunchError`."""
        self._watches.append(ReplayWatch(self._arena, self._outputs, self._unordered))
        return Contestant(name, self._prepare(), self._setup.timer, self._watches[-1], self._setup.flush)

    def validated(self, outputs: dict[str, torch.Tensor]) -> None:
        """From now on the replays are compared with these outputs."""
        self._outputs = outputs
        for watch in self._watches:
            watch.expected = outputs

    def check_work(self, contestant: Contestant) -> CheckResult:
        """After the timing: the replays' outputs, the guard bands, launches back to back with outputs of their own,
        buffers that are to stay zero, and the graph once more on fresh inputs in the buffers that were timed."""
        started = time.perf_counter()
        reason = next(filter(None, (w.fault() for w in self._watches)), "")
        if not reason and int(self._arena.changed_bands() + self._scratch.changed_bands()):
            reason = f"{OUTSIDE} when it was timed."
        if not reason:
            reason = self._idle_launches()
        if not reason:
            reason = dirty_sentence(self._scratch.zeroed, [int(count) for count in self._scratch.dirty_zeros()])
        fresh, largest = self._setup.fresh, float("nan")
        if not reason:
            self._arena.refill(fresh.tensors, fresh.changed())
            self._arena.poison()
            contestant.replay()
            self._setup.timer.synchronize()
            reason, largest = judge(self._arena.outputs, fresh.answer)
            if reason:
                reason = f"on fresh inputs in the timed buffers, {reason}"
            self._arena.refill(self._setup.own.tensors, self._setup.own.changed())
        sentence = f"Case '{fresh.name}': {reason}" if reason else ""
        return CheckResult(
            fresh.name, not reason, largest, first(fresh.answer).allowed_error, sentence, time.perf_counter() - started
        )

    def _idle_launches(self) -> str:
        """Launches back to back in one graph, each with outputs of its own: a sentence if some did not do the work."""
        expected = self._outputs
        if expected is None:
            return ""
        self._arena.restore()
        flat = [{name: torch.empty_like(self._arena.buffers[name]) for name in expected} for _ in range(BACK_TO_BACK)]
        for outputs in flat:
            for out in outputs.values():
                out.view(torch.uint8).fill_(POISON_BYTE)
        with self._setup.timer.side_stream():
            replay = self._setup.timer.capture([self._prepare(**outputs) for outputs in flat])
        replay()
        self._setup.timer.synchronize()
        views = self._arena.outputs
        written = [
            {name: out.as_strided(views[name].shape, views[name].stride()) for name, out in outputs.items()}
            for outputs in flat
        ]
        wrong = sum(apart(outputs, expected, self._unordered) > 0 for outputs in written)
        return (
            f"{wrong} of {BACK_TO_BACK} launches back to back, an output each, did not leave the validated one."
            if wrong
            else ""
        )
