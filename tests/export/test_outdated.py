"""A balanced kernel that was recorded before its blocks had gangs: today's launches do not fit it."""

from dataclasses import replace

import pytest

from evoattn.export.recorded import Recorded
from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.records import CompileInfo, Evaluation, TrialState
from evoattn.profiling.ncu import count
from evoattn.search.profiled import profile_trial
from evoattn.search.reproduce import ReproduceError, reproduce
from evoattn.storage import StorageError
from tests.export import kernels

H100, PROBLEM = GPUS["h100"], kernels.PROBLEMS["flash_wgmma"]


def recorded_as_before(database, schedule):
    config = kernels.a_config("flash_wgmma", PROBLEM, H100, {"SCHEDULE": schedule})
    candidate = render(FAMILIES["flash_wgmma"], PROBLEM, config, H100)
    assert FAMILIES["flash_wgmma"].why_outdated(config, candidate.source) is None
    before = replace(candidate, source=candidate.source.replace("gridDim.y", "gridDim.x").replace("blockIdx.y", "0"))
    assert before.source != candidate.source
    study = database.create_study("s", PROBLEM, H100, False, "genetic", 0, ("flash_wgmma",), {"evoattn": "0"}, {})
    right = Evaluation(TrialState.COMPLETE, "", CompileInfo(registers=168, compiler="NVRTC"))
    return study, database.record(study, config, before, right)


def test_it_is_not_run_again_and_not_exported(database):
    study, trial = recorded_as_before(database, "balanced")
    with pytest.raises(ReproduceError, match=r"without gangs.* was not run"):
        reproduce(database, trial, study, trust_source=True)
    with pytest.raises(ReproduceError, match="without gangs"):
        next(profile_trial(database, trial, study, None, True, count))
    with pytest.raises(StorageError, match=r"without gangs.* Export trial 1 with the evoattn that made it"):
        Recorded.read(database, trial)


def test_other_schedules_fit(database):
    _, trial = recorded_as_before(database, "claimed")
    assert Recorded.read(database, trial).launches
