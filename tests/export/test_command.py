"""`evoattn export` in its three formats."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from evoattn.cli.main import app
from evoattn.export.recorded import Recorded
from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.records import CompileInfo, Evaluation, TrialState
from evoattn.profiling.ncu import count
from evoattn.search.profiled import profile_trial
from evoattn.search.reproduce import ReproduceError, reproduce
from evoattn.storage import Storage, StorageError
from tests.export import kernels
from tests.export.kernels import record


@pytest.fixture
def export(database, tmp_path):
    """Runs the command on a database with one kernel."""
    trial = record(database, "flash_mma", "a100")
    db = str(tmp_path / "kernels.sqlite")
    return lambda *words: CliRunner().invoke(app, ["export", str(trial.number), *map(str, words), "--db", db])


@pytest.mark.slow
def test_the_check_is_what_is_written_unless_told_otherwise(export):
    assert export().stdout == export("--format", "check").stdout
    assert "int main()" in export().stdout


def test_a_header_goes_to_a_file_or_the_terminal(export, tmp_path):
    text = export("--format", "header").stdout
    assert text.startswith("// Attention of head_dim 64, fp16, mask causal_upper_left") and "#pragma once" in text
    assert export("--format", "header", "-o", tmp_path / "kernel.cuh").exit_code == 0
    assert (tmp_path / "kernel.cuh").read_text() == text


def test_torch_is_a_folder(export, tmp_path):
    result = export("--format", "torch", "-o", tmp_path / "op")
    assert result.exit_code == 0 and "README.md" in result.stderr
    assert "from op import attention" in (tmp_path / "op" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, sentence",
    [
        (("--format", "torch"), "name it with -o"),
        (("--format", "torch", "-o", "."), "holds something else"),
        (("--format", "torch", "-o", "build/torch"), "cannot take 'torch'"),
        (("--format", "torch", "-o", "build/my kernel"), "cannot take 'my kernel'"),
    ],
)
def test_refusals_are_one_sentence(export, words, sentence):
    result = export(*words)
    assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1
    assert sentence in result.stderr


def test_a_trial_without_source_is_refused_in_every_format(tmp_path):
    from evoattn.model import gpu
    from evoattn.model.problem import AttentionProblem
    from evoattn.model.records import Evaluation, TrialState
    from evoattn.model.space import KernelConfig

    db = str(tmp_path / "empty.sqlite")
    opened = Storage.open(db)
    problem = AttentionProblem(1, 1, 1, 8, 8, 64)
    study = opened.create_study("s", problem, gpu.lookup("l4"), True, "genetic", 0, ("flash_mma",), {}, {})
    trial = opened.record(study, KernelConfig("flash_mma", {}), None, Evaluation(TrialState.INVALID_CONFIG), (), "x")
    opened.close()
    for kind in ("check", "header", "torch"):
        words = ["export", str(trial.number), "--format", kind, "-o", str(tmp_path / kind), "--db", db]
        result = CliRunner().invoke(app, words)
        assert result.exit_code in (1, 2) and "never became source" in result.stderr and not (tmp_path / kind).exists()


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
