"""On the device: quick times of one kernel on several problems, of which the best are timed carefully in a final."""

import os

import torch

from evoattn.backends.base import ContextLost, LaunchError, QueuedBackend
from evoattn.correctness.cases import make_case, packed, proof_of
from evoattn.correctness.ladder import Ladder
from evoattn.evaluation.memory import Memory
from evoattn.evaluation.tasks import Survey, Surveyed
from evoattn.families.built import BuiltKernel
from evoattn.model.problem import AttentionProblem
from evoattn.timing.clock import GRAPH_UNDER_US, Clock, repeat
from evoattn.timing.timer import Timer

ROUGH = 1.6
"""A first call that takes this many times the best so far is its time."""
LADDERS = 48
"""Sets of small cases that are kept, some 50 MB each: a campaign has 24 to 50 groups, and is sent to and fro among
them."""


class Surveyor:
    """Checks a kernel by the small cases that a study's candidates pass, and times it. Lives in the worker process.

    `broken` once the CUDA context is lost, or may have been harmed."""

    def __init__(self) -> None:
        self.broken, self._seed = False, int.from_bytes(os.urandom(4))
        self._backend, self._timer = _cuda_backend(), Timer()
        self._memory, self._clock = Memory(self._backend, self._seed), Clock()
        self._ladders: dict[tuple[object, ...], Ladder] = {}
        self._stream: torch.cuda.Stream = torch.cuda.Stream()

    def times(self, task: Survey) -> Surveyed:
        """Of a right kernel on each problem, or why there are none."""
        try:
            with torch.cuda.stream(self._stream), torch.no_grad():
                if task.check and (reason := self._why_wrong(task)):
                    return Surveyed(failure=f"wrong: {reason}")
                pairs = zip(task.problems, task.best_us, strict=True)
                return Surveyed(tuple(self._quick(task.kernel, problem, best) for problem, best in pairs))
        except ContextLost as error:
            self.broken = True
            return Surveyed(failure=f"launch: {error}")
        except LaunchError as error:
            return Surveyed(failure=f"launch: {error}")
        except RuntimeError as error:  # of the context, perhaps: what comes next needs a fresh process
            self.broken = True
            return Surveyed(failure=f"launch: {' '.join(str(error).split())[:200]}")

    def _why_wrong(self, task: Survey) -> str:
        """By the small cases of the first problem's kind; an empty string where the kernel is right."""
        *_, last = self._ladder(task.problems[0]).climb(self._backend, task.kernel)
        return "" if last.passed else last.reason

    def _ladder(self, problem: AttentionProblem) -> Ladder:
        made = proof_of(problem).device_cases(problem.with_(name="", scale=None))
        kind = tuple(made)
        if kind not in self._ladders:
            if len(self._ladders) >= LADDERS:
                self._ladders.pop(next(iter(self._ladders)))
            device = self._backend.device
            cases, _ = packed([make_case(name, case, self._seed, device, inputs) for name, case, inputs in made])
            self._ladders[kind] = Ladder(cases, device)
        return self._ladders[kind]

    def _quick(self, kernel: BuiltKernel, problem: AttentionProblem, best: float) -> tuple[float, bool]:
        """(µs, whether it is one call's)."""
        self._memory.reserve(problem)
        enqueue = self._memory.prepare(kernel, problem)
        first = self._clock.first(enqueue)
        if first > ROUGH * best and first > GRAPH_UNDER_US:
            return first, True
        repeated = repeat(enqueue, first, self._timer)
        return min(self._clock.a_call(repeated) for _ in range(2)), False


def _cuda_backend() -> QueuedBackend:
    from evoattn.backends.cuda import CudaBackend  # makes a CUDA context: only where one is wanted

    return CudaBackend()
