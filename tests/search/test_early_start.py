"""The processes of a search that are asked for before its study is made."""

import os
import time
from dataclasses import replace

import pytest

from evoattn.engine.tools import Tools
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Rendered
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import MADE_ROW, DetectedDevice
from evoattn.samplers.for_problem import sampler_of
from evoattn.search.early_start import begun
from evoattn.search.machines import Machines
from evoattn.search.request import SearchWords, plan
from tests.search.search_fakes import FakeCompiler, FakeDevice
from tests.search.studies_of_fakes import PROBLEM

HERE = [DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0")]
WORDS = SearchWords(families=("flash_mma",), jobs=2)
FAKES = Tools(make_compiler=FakeCompiler, make_device=FakeDevice)


def light(words, wanted):
    """The early that `evoattn search` has, whose server imports no torch; here it may."""
    return begun(words, wanted, Machines(HERE), FAKES, lambda: True)


@pytest.mark.slow
def test_all_processes_are_asked_for_at_once_and_end_with_what_went_wrong():
    wanted = plan(WORDS, PROBLEM, HERE)
    with pytest.raises(OSError, match="no such database"), light(WORDS, wanted) as early:
        compilers = early.compilers(FakeCompiler, (PROBLEM, wanted.gpu, False), beside=True)
        devices = early.devices(FakeDevice, (PROBLEM, wanted.gpu, "warm"))
        sampler = early.take_over()
        workers = [*compilers, *devices, sampler.worker]
        while not all(worker.ready for worker in workers):
            for worker in workers:
                worker.poll()
        assert len(compilers) == 2 and len(devices) == 1
        raise OSError("no such database")
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)


def test_nothing_is_begun_offline_or_for_a_card_that_is_measured_first_or_where_imports_are_waited_for():
    offline = plan(SearchWords(families=("flash_mma",), gpu="h100", offline=True), PROBLEM, [])
    with light(WORDS, offline) as early:
        assert early is None
    wanted = plan(WORDS, PROBLEM, HERE)
    unknown = replace(wanted, gpu=replace(wanted.gpu, note=MADE_ROW))
    with light(WORDS, unknown) as early:
        assert early is None
    with begun(WORDS, wanted, Machines(HERE), FAKES, lambda: False) as early:
        assert early is None


@pytest.mark.slow
@pytest.mark.parametrize("budget, given", [("9s", 3), ("2trials", 2)])
def test_first_proposals_are_compiled_before_the_search_takes_over(budget, given):
    words = replace(WORDS, budget=budget, jobs=3)
    wanted = plan(words, PROBLEM, HERE)
    alone = sampler_of("guided", wanted.spaces, PROBLEM, wanted.gpu, 0).ask(given + 1)
    with light(words, wanted) as early:
        compilers = early.compilers(FakeCompiler, (PROBLEM, wanted.gpu, False), beside=True)
        while early._feeding.is_alive() and sum(worker.busy for worker in compilers) < given:
            time.sleep(0.01)
        sampler = early.take_over()
        outcomes = []
        while len(outcomes) < given:
            outcomes += [outcome for worker in compilers if worker.busy and (outcome := worker.poll())]
        assert sorted(str(o.tag.proposal) for o in outcomes) == sorted(map(str, alone[:given]))
        assert [(o.ending, type(o.value)) for o in outcomes] == [(Ending.RESULT, Rendered)] * given
        assert sampler.ask(1) == [alone[given]]


@pytest.mark.slow
def test_a_search_hears_of_a_process_that_failed_before_it_took_over():
    wanted = plan(replace(WORDS, sampler="random"), PROBLEM, HERE)
    with light(replace(WORDS, sampler="none such"), wanted) as early:
        early._feeding.join()
        with pytest.raises(FailedRun):
            early.take_over()
