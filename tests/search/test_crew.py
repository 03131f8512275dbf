"""The processes of a search that are asked for before its study is made."""

import os
from dataclasses import replace

import pytest
from search_puppets import FakeCompiler, FakeDevice
from studies_of_puppets import PROBLEM

from evoattn.model.gpu import MADE_ROW, DetectedDevice
from evoattn.search.crew import begun
from evoattn.search.machines import Machines
from evoattn.search.request import SearchWords, plan
from evoattn.search.tools import Tools

HERE = [DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0")]
WORDS = SearchWords(families=("flash_mma",), jobs=2)
PUPPETS = Tools(make_compiler=FakeCompiler, make_device=FakeDevice)


def test_all_processes_are_asked_for_at_once_and_end_with_what_went_wrong():
    wanted = plan(WORDS, PROBLEM, HERE)
    with pytest.raises(OSError, match="no such database"), begun(WORDS, wanted, Machines(HERE), PUPPETS) as crew:
        assert crew is not None
        compilers = crew.compilers(FakeCompiler, (PROBLEM, wanted.gpu, False), beside=True)
        devices = crew.devices(FakeDevice, (PROBLEM, wanted.gpu, "warm"))
        workers = [*compilers, *devices, crew.sampler.worker]
        for worker in workers:
            worker.wait()
        assert len(compilers) == 2 and len(devices) == 1
        raise OSError("no such database")
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker.pid, 0)


def test_nothing_is_begun_offline_or_for_a_card_that_is_measured_first():
    offline = plan(SearchWords(families=("flash_mma",), gpu="h100", offline=True), PROBLEM, [])
    with begun(WORDS, offline, Machines([]), PUPPETS) as crew:
        assert crew is None
    wanted = plan(WORDS, PROBLEM, HERE)
    unknown = replace(wanted, gpu=replace(wanted.gpu, note=MADE_ROW))
    with begun(WORDS, unknown, Machines(HERE), PUPPETS) as crew:
        assert crew is None
