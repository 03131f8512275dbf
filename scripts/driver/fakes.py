"""Workers for `driver_ceiling.py`: processes that compile and time nothing, and answer after a set time."""

from __future__ import annotations

import hashlib
import os
import time
from abc import abstractmethod
from typing import Any

from evoattn.evaluation.process import Handler
from evoattn.evaluation.tasks import Compile, Compiled, DeviceTask, Gauge, HoldFinal, Rendered
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import (
    CheckResult,
    CompiledKernel,
    CompileInfo,
    Evaluation,
    Timing,
    TrialState,
    ValidationReport,
)
from evoattn.timing.finalists import FinalResult

INFO = CompileInfo(128, seconds=0.5, compiler="NVRTC 13.0", options=("--std=c++17",) * 8)
CUBIN_BYTES = 60_000
"""Of a `flash_wgmma` kernel."""
CHECKS = tuple(CheckResult(f"case {n}", True, 1e-3, 2e-3, "", 1e-3) for n in range(12))
"""As many as a real evaluation has."""


def made_up_us(config_id: str) -> float:
    return 10.0 + int(hashlib.sha256(config_id.encode()).hexdigest()[:6], 16) / (1 << 20)


def timing_of(config_id: str) -> Timing:
    us = made_up_us(config_id)
    return Timing((us,) * 5, {"stage": "screen", "run": config_id, "calls_per_replay": 40, "clocks": {"sm_mhz": 1755}})


class FakeWorker(Handler):
    """Answers after a number of seconds."""

    def __init__(self, seconds: float, *_: Any) -> None:
        self._seconds = seconds

    def __call__(self, task: Any) -> Any:
        time.sleep(self._seconds)
        return self.answer(task)

    @abstractmethod
    def answer(self, task: Any) -> Any:
        """What the worker would answer."""


class FakeCompiler(FakeWorker):
    """Renders, and answers with machine code of the usual size."""

    def __init__(self, seconds: float, problem: AttentionProblem, gpu: GpuSpec, offline: bool) -> None:
        super().__init__(seconds)
        self._problem, self._gpu = problem, gpu

    def answer(self, task: Compile) -> Rendered:
        answer = Compiled(CompiledKernel(os.urandom(CUBIN_BYTES), "", INFO), None, made_up_us(task.config.id))
        return Rendered.of(task, task.rendered(self._problem, self._gpu), self._problem, self._gpu, answer)


class FakeDevice(FakeWorker):
    """Every candidate is right, and takes a time that its config's hash says."""

    def answer(self, task: DeviceTask) -> Evaluation | FinalResult | Timing:
        if isinstance(task, HoldFinal):
            run = {"stage": "final", "run": "final"}
            return FinalResult(
                {n: Timing((made_up_us(f.config.id),), run) for n, f in task.finalists.items()}, {}, True
            )
        timing = timing_of(task.kernel.config.id)
        if isinstance(task, Gauge):
            return Timing((10.0,), timing.protocol)
        return Evaluation(TrialState.COMPLETE, "", INFO, ValidationReport("cuda", CHECKS, 1), (timing,), seconds=0.03)
