"""Records for the storage tests, and how to make them."""

import math

import pytest

from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import (
    Candidate,
    CheckResult,
    CompileInfo,
    Evaluation,
    Study,
    Timing,
    Trial,
    TrialState,
    ValidationReport,
)
from evoattn.model.space import KernelConfig
from evoattn.storage import Storage, StorageError

PROBLEM = AttentionProblem(1, 16, 16, 1024, 1024, 64, name="seed_h100")
INFO = CompileInfo(128, 8, 16, 24, 1024, ("C7510",), 0.3, "NVRTC 13.0", ("-arch=sm_89", "--std=c++17"))
CHECKS = ValidationReport(
    "cuda", (CheckResult("ragged", True, 1e-4, 1e-2), CheckResult("late outlier", False, math.inf, 1e-2, "It differs."))
)


def timing(stage: str, *samples_us: float) -> Timing:
    return Timing(samples_us, {"stage": stage, "cache": "warm", "calls_per_replay": 20})


def make_study(storage: Storage, name: str = "first", offline: bool = False) -> Study:
    versions = {"evoattn": "0.1", "torch": "2.13", "driver": "CUDA 13.0"}
    return storage.create_study(
        name, PROBLEM, GPUS["l4"], offline, "genetic", 7, ("flash_mma",), versions, {"cache": "warm", "jobs": 2}
    )


def record(
    storage: Storage,
    study: Study,
    index: int,
    state: TrialState = TrialState.COMPLETE,
    timings: tuple[Timing, ...] = (),
    reason: str = "",
    relative_cost: float | None = None,
    source: str | None = None,
) -> Trial:
    config = KernelConfig("flash_mma", {"BLOCK_M": index, "SWIZZLE": True, "EXP": "exp2", "SCALE": 0.5})
    candidate = Candidate(
        "flash_mma", config.params, config.id, source or f"constexpr int BLOCK_M = {index}; // µs", "sm_89"
    )
    evaluation = Evaluation(state, reason, INFO, CHECKS, timings, relative_cost, 0.25)
    return storage.record(study, config, candidate, evaluation, (1, 2), "crossover")


def refusal(url: object, **how) -> str:
    with pytest.raises(StorageError) as caught:
        Storage.open(str(url), **how)
    return str(caught.value)
