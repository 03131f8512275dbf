"""What the worker processes run: compiling and ranking in the pool, validating and timing on the device."""

from __future__ import annotations

from typing import Any

from evoattn.evaluation.evaluate import Compiled, DeviceEvaluator, compile_and_rank, evaluate_offline
from evoattn.evaluation.workers import Handler
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, Evaluation
from evoattn.model.space import KernelConfig
from evoattn.timing.benchmark import CacheMode

COMPILE_SECONDS = 30.0
"""A compile with its cost estimate takes 0.1 to 2 s; one that takes this long hangs."""
DEVICE_SECONDS = 20.0
"""An evaluation on the device takes 25 to 500 ms; one that takes this long hangs, or is too slow to matter."""


class CompileHandler(Handler):
    """The compile pool's process; with `offline` it checks and ranks too."""

    def __init__(self, problem: AttentionProblem, gpu: GpuSpec, offline: bool) -> None:
        import torch

        torch.set_num_threads(1)  # the pool is as wide as the machine
        self._problem, self._gpu, self._offline = problem, gpu, offline

    def __call__(self, task: tuple[Candidate, KernelConfig]) -> Compiled | Evaluation:
        candidate, config = task
        work = evaluate_offline if self._offline else compile_and_rank
        return work(candidate, config, self._problem, self._gpu)


class DeviceHandler(Handler):
    """The GPU worker's process. Tasks: `(method of DeviceEvaluator, arguments)`."""

    def __init__(self, problem: AttentionProblem, gpu: GpuSpec, cache: CacheMode) -> None:
        self._evaluator = DeviceEvaluator(problem, gpu, cache, report=self.report)

    def __call__(self, task: tuple[str, tuple]) -> Any:
        method, args = task
        try:
            return getattr(self._evaluator, method)(*args)
        finally:
            self.broken = self._evaluator.broken
