"""What the bench's processes run: a compiler for any problem, and one GPU worker that goes from problem to problem."""

from __future__ import annotations

from typing import Any

from evoattn.backends.compiler import CompileError, compile_candidate
from evoattn.evaluation.evaluate import DeviceEvaluator
from evoattn.evaluation.workers import Handler
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CompiledKernel
from evoattn.timing.benchmark import CacheMode

COMPILE_SECONDS = 60.0
START_SECONDS = 60.0
"""Inputs and answers of a problem: 0.1 to 5 s."""
FINAL_SECONDS = 240.0
"""A final in which FlashAttention 4 is imported and compiled just in time takes 20 to 40 s."""


class CompileAny(Handler):
    """Candidate → its machine code, or the sentence with which it does not compile."""

    def __call__(self, task: Candidate) -> CompiledKernel | str:
        try:
            return compile_candidate(task)
        except CompileError as error:
            return str(error)


class BenchDevice(Handler):
    """The GPU worker's process: it lives through all problems, so that a peer is imported once. Tasks: `(problem, method, arguments)`."""

    def __init__(self, gpu: GpuSpec, cache: CacheMode) -> None:
        self._gpu, self._cache = gpu, cache
        self._evaluator: DeviceEvaluator | None = None

    def __call__(self, task: tuple[AttentionProblem, str, tuple]) -> Any:
        import torch

        problem, method, args = task
        if self._evaluator is None or self._evaluator.problem != problem:
            self._evaluator = None  # its inputs and answers leave the device before the next ones come
            torch.cuda.empty_cache()
            self._evaluator = DeviceEvaluator(problem, self._gpu, self._cache, report=self.report)
        try:
            return getattr(self._evaluator, method)(*args)
        finally:
            self.broken = self._evaluator.broken
