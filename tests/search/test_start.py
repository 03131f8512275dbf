"""What makes a search start fast: no torch in its own process, workers forked from one that has it; what is said where
torch's import is slow."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from multiprocessing import forkserver

import pytest
from rich.console import Console

from evoattn.cli.run import run_search
from evoattn.engine.tools import Tools
from evoattn.evaluation import server
from evoattn.evaluation.process import Ending, Handler
from evoattn.evaluation.tasks import Rendered
from evoattn.evaluation.workers import Worker
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import MADE_ROW, DetectedDevice
from evoattn.model.problem import ProblemError
from evoattn.model.timeline import FILE, mark
from evoattn.peers.labels import PEER_NAMES
from evoattn.peers.table import PEERS
from evoattn.samplers.for_problem import sampler_of
from evoattn.search.early_start import begun
from evoattn.search.machines import Machines
from evoattn.search.request import SearchWords, plan, read_words
from evoattn.search.setup import begin_study
from tests.search.search_fakes import FakeCompiler, FakeDevice
from tests.search.studies_of_fakes import PROBLEM, fakes


def said(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True).stdout


@pytest.mark.slow
def test_the_search_s_own_process_imports_no_torch():
    code = "import sys, evoattn.cli.search, evoattn.cli.run, evoattn.search.setup, evoattn.search.early_start"
    assert said(f"{code}; print(sorted({{'torch', 'cupy', 'optuna', 'numpy'}} & set(sys.modules)))").strip() == "[]"


@pytest.mark.slow
def test_a_light_server_forks_workers_that_have_all_but_torch():
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from evoattn.evaluation import preloaded_light, server\n"
        "print(len([*Path('/proc/self/task').iterdir()]))\n"
        "names = ['torch', 'evoattn.evaluation.compile', 'evoattn.samplers.guided', 'numpy', 'cupy']\n"
        "print([name in sys.modules for name in names])\n"
        "server.start(light=True)\n"
        "server.start()\n"
        "print(server.is_light())\n"
    )
    assert said(code).split("\n") == ["1", "[False, True, True, True, True]", "True", ""]


@pytest.mark.slow
def test_torch_s_libraries_are_loaded_before_torch_is_imported():
    code = (
        "import sys\n"
        "from evoattn.evaluation.imports import LIBRARIES, load_libraries\n"
        "load_libraries()\n"
        "maps = open('/proc/self/maps').read()\n"
        "print([name in maps for name, _ in LIBRARIES], 'torch' in sys.modules)"
    )
    assert said(code).strip() == "[True, True] False"


@pytest.mark.slow
def test_the_server_has_what_workers_need_and_no_cuda():
    code = (
        "import sys, torch, evoattn.evaluation.preloaded\n"
        "names = ['cupy', 'evoattn.evaluation.device', 'evoattn.evaluation.evaluate']\n"
        "print([name in sys.modules for name in names], torch.cuda.is_initialized())"
    )
    assert said(code).strip() == "[True, True, True] False"


def test_the_names_of_the_peers_are_those_of_the_table():
    assert tuple(PEERS) == PEER_NAMES


@pytest.mark.slow
def test_a_compile_worker_of_a_search_on_a_device_imports_no_torch():
    code = "import sys, evoattn.evaluation.handlers as handlers; handlers._compile()"
    assert said(f"{code}; print(sorted({{'torch', 'sqlalchemy', 'typer'}} & set(sys.modules)))").strip() == "[]"


class Surroundings(Handler):
    """Tells the value of a variable, its directory, and whose child it is."""

    def __call__(self, task):
        return os.environ.get(task), os.getcwd(), os.getppid()


@pytest.mark.slow
def test_a_worker_has_the_surroundings_of_who_asks_for_it(tmp_path, monkeypatch):
    server.start()
    servers = []
    for value in ("one", "other"):
        monkeypatch.setenv("EVOATTN_TEST_OF_WORKERS", value)
        monkeypatch.chdir(tmp_path)
        worker = Worker(Surroundings)
        try:
            found, folder, parent = worker.ask("EVOATTN_TEST_OF_WORKERS", 20.0).value
        finally:
            worker.stop()
        assert (found, folder) == (value, str(tmp_path)) and parent != os.getpid()
        servers.append(parent)
    assert servers[0] == servers[1] == forkserver._forkserver._forkserver_pid


@pytest.mark.slow
def test_the_next_worker_is_the_process_held_ready_and_the_one_after_it_a_fork(tmp_path, monkeypatch):
    server.begin_spare()
    monkeypatch.setenv("EVOATTN_TEST_OF_WORKERS", "set later")
    workers = [Worker(Surroundings), Worker(Surroundings)]
    try:
        found = [worker.ask("EVOATTN_TEST_OF_WORKERS", 60.0).value for worker in workers]
    finally:
        for worker in workers:
            worker.stop()
    assert [value for value, _, _ in found] == ["set later", "set later"]
    assert [parent == os.getpid() for _, _, parent in found] == [True, False]
    assert server.take_spare(), "another was begun for who comes after"


def test_a_process_held_ready_that_died_is_no_worker():
    server.begin_spare()
    spare = server._spare[0]
    spare.process.kill()
    spare.process.join()
    assert server.take_spare() is None and server.take_spare() is None


def test_events_are_written_down_where_a_file_is_named(tmp_path, monkeypatch):
    mark("nobody reads this")
    monkeypatch.setenv(FILE, str(tmp_path / "timeline"))
    mark("it begins")
    mark("it ends")
    lines = [line.split("\t") for line in (tmp_path / "timeline").read_text().splitlines()]
    assert [line[3] for line in lines] == ["it begins", "it ends"]
    assert float(lines[0][0]) <= float(lines[1][0]) and {line[1] for line in lines} == {str(os.getpid())}


DEVICE = DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0")


@pytest.mark.slow
@pytest.mark.parametrize("sentence, notes", [("its bytecode is not kept.", 1), ("", 0)])
def test_the_sentence_is_a_note_before_the_search(tmp_path, sentence, notes):
    words = SearchWords(
        budget="1trials",
        problem="seed_h100",
        families=("flash_mma",),
        sampler="random",
        db=str(tmp_path / "db"),
        jobs=1,
    )
    request, console = read_words(words), Console(file=StringIO(), width=200)
    prepared = begin_study(request, plan(words, request.problem, [DEVICE]))
    asked = []

    def why_slow(spec):
        asked.append(spec.name)
        return sentence

    run_search(prepared, Machines([DEVICE]), console, fakes(), why_slow=why_slow)
    assert asked == ["torch"]
    assert console.file.getvalue().count("Note: its bytecode is not kept.") == notes


@pytest.mark.parametrize(
    "changed",
    [
        *({"problem": "seed_h100"}, {"shape": "B=1,H=1,S=32,D=16"}, {"families": ("flash_mma",)}, {"seed": 0}),
        *({"choices": ("STAGES=2",)}, {"sampler": "random"}, {"cache": "cold"}, {"starting_configs": False}),
    ],
)
def test_what_a_resumed_study_keeps_cannot_be_said_again(changed):
    read_words(SearchWords(resume=True, study="a"))
    with pytest.raises(ProblemError, match="A resumed study keeps"):
        read_words(SearchWords(resume=True, study="a", **changed))


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
