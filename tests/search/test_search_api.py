"""`evoattn.search` from Python: a study without a terminal, and what it says when nothing comes of it."""

import importlib

import pytest
from search_fakes import INFO, FakeCompiler, FakeDevice

import evoattn
from evoattn.evaluation.process import Handler
from evoattn.model.errors import FailedRun, WrongUse
from evoattn.model.gpu import DetectedDevice
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, Evaluation, TrialState
from evoattn.search.machines import Machines
from evoattn.search.tools import Tools
from evoattn.storage import Storage

PROBLEM = AttentionProblem(1, 4, 4, 256, 256, 64)
HERE = [DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0")]


def tools(device=FakeDevice) -> Tools:
    return Tools(
        compile=lambda candidate: CompiledKernel(b"", "", INFO), make_compiler=FakeCompiler, make_device=device
    )


def search(tmp_path, **words):
    words = dict(families=["flash_mma"], budget="12trials", jobs=1, machines=Machines(HERE), tools=tools()) | words
    return evoattn.search(PROBLEM, db=str(tmp_path / "db.sqlite"), **words)


def test_a_search_and_its_result(tmp_path):
    seen = []
    result = search(tmp_path, study="mine", refresh=lambda progress: seen.append(progress.recorded))
    assert result.study == "mine"
    assert result.best.family == "flash_mma"
    assert result.best.state is TrialState.COMPLETE
    assert result.value == result.best.timing.median_us
    assert result.peers == {"flash": 30.0}
    assert result.ratio == pytest.approx(result.value / 30.0)
    assert seen[-1] == 12
    storage = Storage.open(result.db)
    assert storage.chosen_study("mine").problem["seqlen_q"] == 256
    storage.close()


class AllWrong(Handler):
    def __init__(self, problem, gpu, cache):
        self._ours = FakeDevice(problem, gpu, cache)

    def __call__(self, task):
        if hasattr(task, "kernel"):
            return Evaluation(TrialState.WRONG_RESULT, "All are wrong.", INFO)
        return self._ours(task)


@pytest.mark.slow
def test_nothing_right_is_said_in_one_sentence(tmp_path):
    with pytest.raises(FailedRun, match=r"has no right kernel: 3 candidates were recorded\.$"):
        search(tmp_path, budget="3trials", tools=tools(AllWrong))


@pytest.mark.parametrize(
    "words", [dict(budget="soon"), dict(families=["nothing"]), dict(gpu="nothing"), dict(sampler="nothing")]
)
def test_wrong_words_are_one_sentence(tmp_path, words):
    with pytest.raises(WrongUse) as error:
        search(tmp_path, **words)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "db.sqlite").exists()


def test_the_name_is_a_package_and_can_be_called():
    assert importlib.import_module("evoattn.search") is evoattn.search
    assert callable(evoattn.search)
