"""What the bench's processes run: a compiler for any problem, and one GPU worker that goes from problem to problem."""

from __future__ import annotations

from dataclasses import dataclass

from evoattn.evaluation.process import Handler
from evoattn.evaluation.tasks import Compiled, DeviceAnswer, DeviceTask
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, Evaluation, TrialState
from evoattn.timing.protocol import CacheMode

CACHE: CacheMode = "warm"
"""All calls of a bench find what the one before left in the L2."""
COMPILE_SECONDS = 60.0
START_SECONDS = 60.0
"""Inputs and answers of a problem: 0.1 to 5 s."""
FINAL_SECONDS = 240.0
"""A final in which FlashAttention 4 is imported and compiled just in time takes 20 to 40 s."""


class CompileAny(Handler):
    """Candidate → its machine code, or the failure; no cost estimate."""

    def __call__(self, task: Candidate) -> Compiled:
        from evoattn.backends.compiler import CompileError, compile_candidate

        try:
            return Compiled(compile_candidate(task), None)
        except CompileError as error:
            return Compiled(None, Evaluation(TrialState.COMPILE_ERROR, str(error)))


@dataclass(frozen=True)
class BenchTask:
    """A task of the GPU worker, for one of the problems."""

    problem: AttentionProblem
    task: DeviceTask


class BenchDevice(Handler):
    """The GPU worker's process: it lives through all problems, so that a peer is imported once. Answers a
    `BenchTask`."""

    def __init__(self, gpu: GpuSpec) -> None:
        from evoattn.evaluation.device import DeviceEvaluator

        self._gpu, self._make = gpu, DeviceEvaluator
        self._evaluator: DeviceEvaluator | None = None

    def __call__(self, task: BenchTask) -> DeviceAnswer:
        import torch

        if self._evaluator is None or self._evaluator.problem != task.problem:
            self._evaluator = None  # its inputs and answers leave the device before the next ones come
            torch.cuda.empty_cache()
            self._evaluator = self._make(task.problem, self._gpu, CACHE, report=self.report)
        try:
            return self._evaluator.do(task.task)
        finally:
            self.broken = self._evaluator.broken
