"""`evoattn.search` from Python: a study without a terminal, and what it says when nothing comes of it. What a search
found is what the op runs, where its final says that it is clearly ahead. What a search found is what the op runs,
where its final says that it is clearly ahead."""

import importlib
import multiprocessing
import subprocess
import sys
from dataclasses import replace

import pytest

import evoattn
from evoattn.engine.budget import Budget
from evoattn.engine.tools import Tools
from evoattn.evaluation.process import Handler
from evoattn.families.registry import load_space
from evoattn.model.errors import FailedRun, WrongUse
from evoattn.model.gpu import GPUS, DetectedDevice
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, Evaluation, Timing, TrialState
from evoattn.model.space import KernelConfig
from evoattn.portfolio.pick import pick
from evoattn.portfolio.wins import Wins
from evoattn.search import api
from evoattn.search.kept import keep_leader
from evoattn.search.machines import Machines
from evoattn.search.request import SearchPlan, SearchWords
from evoattn.search.setup import PreparedSearch
from evoattn.search.starting import begin
from evoattn.storage import Storage
from evoattn.storage.trials import NewTrial
from tests.search.search_fakes import INFO, FakeCompiler, FakeDevice

PROBLEM = AttentionProblem(1, 4, 4, 256, 256, 64)
HERE = [DetectedDevice(0, "NVIDIA H100 80GB HBM3", (9, 0), "13.0")]


def tools(device=FakeDevice) -> Tools:
    return Tools(
        compile=lambda candidate: CompiledKernel(b"", "", INFO),
        make_compiler=FakeCompiler,
        make_device=device,
        compile_seconds=2.0,  # some hang
        device_seconds=2.0,
    )


def search(tmp_path, **words):
    words = dict(families="flash_mma", budget="12trials", jobs=1, machines=Machines(HERE), tools=tools()) | words
    return evoattn.search(PROBLEM, **(dict(db=tmp_path / "db.sqlite") | words))


@pytest.mark.slow
def test_a_search_and_its_result(tmp_path):
    seen = []
    result = search(tmp_path, study="mine", refresh=lambda progress: seen.append(progress.recorded))
    assert result.study == "mine" and result.db == str(tmp_path / "db.sqlite")
    assert result.best.family == "flash_mma"
    assert result.best.state is TrialState.COMPLETE
    assert result.value == result.best.timing.median_us
    assert result.peers == {"flash": 30.0}
    assert result.ratio == pytest.approx(result.value / 30.0)
    assert seen[-1] == 12
    said = str(result).splitlines()
    assert said[0] == PROBLEM.describe() and said[3] == f"Kept: study mine in {result.db}"
    assert str(replace(result, kept="")).count("\n") == 3 and str(replace(result, kept="So.")).endswith("\nSo.")
    assert said[1].startswith(
        f"Best kernel: trial {result.best.number} (flash_mma), {result.value:.2f} µs, {result.ratio:.3f} of"
    )
    assert "BLOCK_M=" in said[2]
    assert said[-1] == result.kept and "not clearly ahead of SDPA flash" in result.kept
    assert " in postgresql://ada@host/base\n" in str(replace(result, db="postgresql://ada:secret@host/base"))
    storage = Storage.open(result.db)
    assert storage.chosen_study("mine").problem["seqlen_q"] == 256
    storage.close()


UNGUARDED = """
import multiprocessing
import evoattn
print("This file runs as", __name__, flush=True)
result = evoattn.search("B=1,H=2,S=96,D=32", "1trials", gpu="l4", db={db!r}, jobs=1)
print(result)
other = multiprocessing.get_context("spawn").Process(target=print)
other.start(), other.join()
print(__file__, __spec__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("as_input", [False, True])
@pytest.mark.sampled(2)
def test_a_script_needs_no_guard_as_workers_do_not_import_it(tmp_path, as_input):
    script, db = tmp_path / "script.py", str(tmp_path / "db.sqlite")
    script.write_text(UNGUARDED.format(db=db))
    words = [sys.executable, "-" if as_input else str(script)]
    given = script.read_text() if as_input else None
    done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("This file runs as __main__") == 1 and "Best kernel: trial 1" in done.stdout
    assert done.stdout.splitlines()[-1] == f"{'<stdin>' if as_input else script} None", "main is as it was"
    if not as_input:  # a process of another library imports the script, and begins no study
        assert done.stdout.count("This file runs as") == 2
        assert 'put the call under `if __name__ == "__main__":`.' in done.stderr.strip().splitlines()[-1]
    storage = Storage.open(db)
    assert len(storage.studies()) == 1
    storage.close()


def _sentence_of(call):
    """In a process of a pool: what `search` or `tune` says there."""
    try:
        getattr(evoattn, call)(PROBLEM, "1m")
    except WrongUse as error:
        return str(error)


@pytest.mark.slow
def test_a_daemonic_process_begins_no_study():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for call in ("search", "tune"):
            assert "forbids in a daemonic one" in pool.apply(_sentence_of, (call,))


IN_A_FORK = """
import os
import evoattn
from evoattn.model.errors import WrongUse
search = lambda: evoattn.search("B=1,H=2,S=96,D=32", "1trials", gpu="l4", db={db!r}, jobs=1)
search()
child = os.fork()
if not child:
    try:
        search()
    except WrongUse as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
search()
"""


@pytest.mark.slow
def test_a_fork_of_a_process_that_has_searched_says_what_to_do(tmp_path):
    script = IN_A_FORK.format(db=str(tmp_path / "db.sqlite"))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("A process that was forked from one that has searched can start no workers")


def test_what_is_no_problem_is_one_sentence(tmp_path):
    with pytest.raises(WrongUse, match=r"a shape as text, not a tuple\.$"):
        evoattn.search((1, 16, 1024, 64), gpu="l4", db=str(tmp_path / "db.sqlite"))


class NeverStarts(FakeDevice):
    def __init__(self, problem, gpu, cache):
        raise OSError("There is no driver.")


@pytest.mark.slow
def test_workers_that_do_not_start_end_the_search_with_their_reason(tmp_path):
    with pytest.raises(FailedRun, match=r"failed to start 3 times; the last time: OSError: There is no driver\.$"):
        search(tmp_path, tools=tools(NeverStarts))


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
    "words",
    [
        dict(budget="soon"),
        dict(families=["nothing"]),
        dict(families=5),
        dict(families=[5]),
        dict(gpu="nothing"),
        dict(gpu=None),
        dict(gpu=GPUS["l4"]),
        dict(sampler="nothing"),
        dict(sampler=5),
        dict(study=5),
        dict(seed="x"),
        dict(seed=-1),
        dict(seed=1.5),
        dict(seed=2**31),
        dict(jobs=0),
        dict(jobs="2"),
        dict(devices=[0, 1]),
        dict(db=3),
    ],
    ids=str,
)
def test_wrong_words_are_one_sentence(tmp_path, words):
    with pytest.raises(WrongUse) as error:
        search(tmp_path, **words)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "db.sqlite").exists()


def test_the_name_is_a_package_and_can_be_called():
    assert importlib.import_module("evoattn.search") is evoattn.search
    assert callable(evoattn.search)


GPU = GPUS["h100"]
TO_KEEP = AttentionProblem(2, 8, 8, 1024, 1024, 64, mask="causal_lower_right")
TODAY = pick(TO_KEEP.canonical(), GPU).config
OTHER = next(c for c in load_space("flash_mma", GPU).starting_configs())


@pytest.fixture
def wins(tmp_path):
    return Wins(tmp_path / "wins.jsonl")


@pytest.fixture
def study(tmp_path):
    """Records times of configs in a final, beside SDPA's; gives what `keep_leader` takes."""
    storage = Storage.open(str(tmp_path / "db.sqlite"))

    def made(*timed: tuple[KernelConfig, float], sdpa=50.0, offline=False, stage="final", cache="warm"):
        record = storage.create_study("s", TO_KEEP, GPU, offline, "guided", 0, ("flash_mma",), {}, {})
        words = {"stage": stage, "run": "one", "cache": cache}
        for config, us in timed:
            trial = Evaluation(TrialState.COMPLETE, timings=(Timing((us,), words),))
            storage.record_all(record, [NewTrial(config, None, trial)])
        if sdpa:
            storage.add_peer(record, "flash", Timing((sdpa,), words))
        storage.add_peer(record, "cudnn", Timing((1.0,), words | {"run": "another"}))
        plan = SearchPlan(TO_KEEP, GPU, None, {})
        return PreparedSearch(storage, record, plan, Budget(1.0), SearchWords())

    yield made
    storage.close()


def test_a_leader_that_is_clearly_ahead_is_kept_and_begun_with(study, wins):
    said = keep_leader(study((OTHER, 10.0), (TODAY, 12.0)), wins)
    assert (
        said
        == f"evoattn.attention runs it from now on, in place of {pick(TO_KEEP, GPU).family} {TODAY.id[:8]}, 12.00 µs."
    )
    found = wins.find(TO_KEEP.canonical(), GPU)
    assert found.config.id == OTHER.id and "10.00 µs, 12.00 µs before" in found.why


@pytest.mark.parametrize(
    ("times", "sentence"),
    [
        (((TODAY, 10.0), (OTHER, 12.0)), "runs this kernel already"),
        (((OTHER, 11.9), (TODAY, 12.0)), "not clearly ahead of"),
        (((OTHER, 49.9), (TODAY, 60.0)), "not clearly ahead of SDPA flash, 50.00 µs"),
        (((OTHER, 10.0),), "was not timed in this study"),
    ],
)
def test_else_the_op_goes_on_as_it_does(study, wins, times, sentence):
    assert sentence in keep_leader(study(*times), wins)
    assert wins.find(TO_KEEP.canonical(), GPU) is None


@pytest.mark.parametrize("words", [{"offline": True}, {"stage": "repeat"}])
def test_without_a_final_nothing_is_said(study, wins, words):
    assert keep_leader(study((OTHER, 10.0), (TODAY, 12.0), **words), wins) == ""


def test_a_time_with_a_cold_cache_decides_nothing(study, wins):
    assert "cold cache" in keep_leader(study((OTHER, 10.0), (TODAY, 12.0), cache="cold"), wins)


def test_where_nothing_ran_before_the_leader_is_what_runs(study, wins, monkeypatch):
    made = study((OTHER, 10.0), sdpa=None)
    ampere = replace(made, plan=SearchPlan(TO_KEEP.with_(softcap=3.0), GPUS["a100"], None, {}))
    assert keep_leader(ampere, wins) == "evoattn.attention runs it from now on."
    assert wins.find(TO_KEEP.with_(softcap=3.0).canonical(), GPUS["a100"]).why.endswith("nothing else could be timed")


def test_a_search_begins_with_what_was_kept(study, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    space = load_space("flash_mma", GPU)
    unusual = space.make_config(OTHER.params | {"STAGES": 1})
    kept = Wins()
    assert str(kept.path).startswith(str(tmp_path))
    assert keep_leader(study((unusual, 10.0), (TODAY, 12.0))).startswith("evoattn.attention runs it")
    chosen = begin({"flash_mma": space}, TO_KEEP, GPU)["flash_mma"]
    assert chosen.starting[0] == unusual.params and len(chosen.starting) == len(set(map(str, chosen.starting)))


def test_families_are_a_name_or_several():
    assert [api._names(given) for given in ("split_kv", ["a", "b"], iter("ab"))] == [
        ("split_kv",),
        ("a", "b"),
        ("a", "b"),
    ]
    for given in (3, [3], ("a", None)):
        with pytest.raises(WrongUse, match="families must be names"):
            api._names(given)
