"""The device side of the engine, in a process that owns the GPU: quick checks, and quick or careful times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from evoattn.backends.base import ContextLost, LaunchError
from evoattn.correctness.cases import Case, fitted, make_case, sequenced
from evoattn.correctness.validate import run_case
from evoattn.evaluation.process import Handler
from evoattn.families.built import BuiltKernel
from evoattn.model.problem import AttentionProblem
from evoattn.portfolio.engine.clock import GRAPH_UNDER_US, Clock, repeat
from evoattn.portfolio.engine.final import Final
from evoattn.portfolio.engine.memory import Memory
from evoattn.timing.timer import Timer

ROUGH = 1.6
"""A first call that takes this many times the best so far is its time."""


@dataclass(frozen=True)
class Job:
    """One compiled kernel: `indexes` are the problems to time it on, `best_us` the best so far of each."""

    group: str
    kernel: BuiltKernel
    check: bool
    indexes: tuple[int, ...]
    best_us: tuple[float, ...]


class Stage(Handler):
    """Tasks: `("register", group, problems)`, `("job", Job)`, `("prove", group, index, kernel)` and
    `("final", group, index, kernels, rounds, peers)`."""

    def __init__(self, seed: int = 0) -> None:
        from evoattn.backends.cuda import CudaBackend  # in the GPU process alone: the engine's own never loads CUDA

        self._backend, self._seed = CudaBackend(), seed
        self._memory, self._clock, self._timer = Memory(self._backend, seed), Clock(), Timer()
        self._problems: dict[str, list[AttentionProblem]] = {}
        self._cases: dict[str, list[Case]] = {}
        self._stream: torch.cuda.Stream = torch.cuda.Stream()
        self._methods: dict[str, Callable[..., object]] = {
            "register": self._register,
            "job": self._job,
            "prove": self._prove,
            "final": self._final,
        }

    def __call__(self, task: tuple[Any, ...]) -> object:
        name, *arguments = task
        try:
            with torch.cuda.stream(self._stream), torch.no_grad():
                return self._methods[name](*arguments)
        except RuntimeError:  # of the context, perhaps: what comes next needs a fresh process
            self.broken = True
            raise

    def _register(self, group: str, problems: list[AttentionProblem]) -> None:
        self._problems[group] = problems
        for problem in problems:
            self._memory.reserve(problem)
        one = problems[0].with_(batch=2, layout="bhsd", varlen="")
        grouped = any(p.group_size > 1 for p in problems)
        ragged = one.with_(heads=4 if grouped else 2, kv_heads=2, seqlen_q=203, seqlen_k=239)
        query = one.with_(heads=8, kv_heads=2, seqlen_q=1, seqlen_k=799)
        cases = [ragged] if one.causal and not one.page else [ragged, query]
        pages = sorted({p.page for p in problems})  # an argument of a launch: one kernel serves several sizes
        cases = [case.with_(page=page) for case in cases for page in pages]
        cases = [sequenced(case) if problems[0].varlen else fitted(case, 65, 30) for case in cases]
        self._cases[group] = [make_case("quick", case, self._seed, self._backend.device) for case in cases]

    def _job(self, job: Job) -> dict[int, tuple[float, bool]] | str:
        """{index: (µs, rough)} of a right kernel, or a sentence."""
        self.report(job.kernel.config.describe())
        try:
            if job.check and (reason := self._why_wrong(job)):
                return f"wrong: {reason}"
            found = {}
            for index, best in zip(job.indexes, job.best_us, strict=True):
                found[index] = self._quick(job, self._problems[job.group][index], best)
            return found
        except ContextLost as error:
            self.broken = True
            return f"launch: {error}"
        except LaunchError as error:
            return f"launch: {error}"
        except RuntimeError as error:
            self.broken = True
            return f"launch: {' '.join(str(error).split())[:200]}"

    def _why_wrong(self, job: Job) -> str:
        """By its group's cases, of pages those that it can read; an empty string where it is right."""
        kernel, cases = job.kernel, self._cases[job.group]
        able = [c for c in cases if not kernel.family.why_impossible(c.problem, kernel.config, kernel.gpu)]
        for case in able or cases:
            result, _ = run_case(self._backend, kernel, case)
            if not result.passed:
                return result.reason
        return ""

    def _quick(self, job: Job, problem: AttentionProblem, best: float) -> tuple[float, bool]:
        enqueue = self._memory.prepare(job.kernel, problem)
        first = self._clock.first(enqueue)
        if first > ROUGH * best and first > GRAPH_UNDER_US:
            return first, True
        repeated = repeat(enqueue, first, self._timer)
        return min(self._clock.a_call(repeated) for _ in range(2)), False

    def _prove(self, group: str, index: int, kernel: BuiltKernel) -> str:
        """Why the kernel is wrong on the problem itself, run twice between guard bands; an empty string where it is
        right."""
        problem = self._problems[group][index]
        case = make_case("the problem's own shape", problem, self._seed + 1, self._backend.device)
        try:
            return run_case(self._backend, kernel, case, repeat=True)[0].reason
        except LaunchError as error:
            return str(error)

    def _final(
        self, group: str, index: int, kernels: list[BuiltKernel], rounds: int, peers: tuple[str, ...]
    ) -> tuple[list[float | None], dict[str, float], dict[str, str], dict[str, list[float]]]:
        """What `Final.run` gives, and its samples."""
        final = Final(self._memory, self._timer, self._problems[group][index])
        times = final.run(kernels, peers, rounds, index)
        self._backend.synchronize()  # raises if a kernel or a peer has broken the context
        return *times, final.samples
