"""The loop on a device that misbehaves: a death, a hang or a failed compile costs its candidate and no more; kill -9
and Ctrl-C lose nothing."""

import io
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console
from search_puppets import (
    INFO,
    AlwaysDoubtsItself,
    CloseFinals,
    DiesInFinals,
    DiesOfAFinalist,
    DoubtsItself,
    FakeCompiler,
    FakeDevice,
    SlowToStart,
    cost,
)

from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model import gpu
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, Evaluation, Proposal, Timing, TrialState
from evoattn.model.space import KernelConfig, load_space
from evoattn.report.show import print_trial
from evoattn.samplers.base import STARTING
from evoattn.samplers.registry import make_sampler
from evoattn.search import finalists
from evoattn.search.budget import Budget
from evoattn.search.loop import Search
from evoattn.search.progress import Progress
from evoattn.search.tools import Tools
from evoattn.storage import Storage

PROBLEM = AttentionProblem(1, 4, 4, 256, 256, 64)
GPU = gpu.GPUS["h100"]


def why_invalid(family: str, params: dict) -> str | None:
    return FAMILIES[family].why_invalid(PROBLEM, KernelConfig(family, params), GPU)


def puppets(device=FakeDevice, **limits) -> Tools:
    """No compiler, and `device` for a GPU worker."""
    return Tools(
        compile=lambda candidate: CompiledKernel(b"", "", INFO),
        make_compiler=FakeCompiler,
        make_device=device,
        **limits,
    )


@pytest.fixture
def storage(tmp_path):
    opened = Storage.open(str(tmp_path / "db.sqlite"))
    yield opened
    opened.close()


def space_of(**choices: str):
    """flash_mma's space, restricted to values separated by commas."""
    space = load_space("flash_mma", GPU)
    return {"flash_mma": space.restricted({name: tuple(v.split(",")) for name, v in choices.items()})}


def make_search(storage, spaces, tools, jobs=1, offline=False, sampler="random"):
    """A search of the study `fake`, new or resumed."""
    study = storage.find_study("fake") or storage.create_study(
        "fake", PROBLEM, GPU, offline, sampler, 0, tuple(spaces), {}, {}
    )
    made = make_sampler(sampler, spaces, PROBLEM, 0, why_invalid)
    return Search(storage, study, PROBLEM, GPU, spaces, made, jobs, tools=tools)


def test_misbehaving_workers_cost_their_candidates_only(storage):
    spaces = {"flash_mma": load_space("flash_mma", GPU)}
    running = make_search(storage, spaces, puppets(compile_seconds=1.0, device_seconds=1.0), jobs=3)
    study = running.study
    progress = running.run(Budget(trials=34))
    counts = storage.counts(study)
    assert progress.recorded == 34 == sum(counts.values())
    assert set(counts) == {
        TrialState.COMPLETE,
        TrialState.COMPILE_ERROR,
        TrialState.LAUNCH_ERROR,
        TrialState.WORKER_DIED,
        TrialState.TIMEOUT,
    }
    fates = {
        TrialState.COMPILE_ERROR: lambda c: c["WARPS"] == 6,
        TrialState.WORKER_DIED: lambda c: c["STAGES"] == 3,
        TrialState.LAUNCH_ERROR: lambda c: c["KEY_WARPS"] == 2,
        TrialState.TIMEOUT: lambda c: c["WARPS"] == 3 or (c["STAGES"] == 4 and c["BLOCK_N"] < 64),
    }
    for trial in storage.iter_trials(study):
        if trial.state in fates:
            assert fates[trial.state](trial.config) and trial.reason, trial
        else:
            assert trial.state is TrialState.COMPLETE and trial.relative_cost == cost(trial.config)
    best = storage.leaderboard(study, 1)[0]
    assert best.timing.protocol["stage"] == "final"
    assert best.timing.median_us == min(t.timing.median_us for t in storage.iter_trials(study) if t.timing)
    assert storage.peers(study)["flash"][-1].interleaved_with(best.timing) and "cudnn" in storage.refusals(study)
    assert progress.best.number == best.number and progress.best_value == best.timing.median_us
    assert progress.peers == {"flash": 30.0} and progress.ratio == best.timing.median_us / 30.0
    seconds, values = zip(*progress.improvements, strict=True)
    assert list(seconds) == sorted(seconds) and list(values) == sorted(values, reverse=True)
    assert values[-1] == best.timing.median_us and 0 < progress.since_improvement <= progress.seconds


class Scripted:
    """A sampler that proposes what it was given."""

    def __init__(self, *proposals):
        self.left, self.told, self.rejected = list(proposals), [], Counter()

    def ask(self, n):
        taken, self.left = self.left[:n], self.left[n:]
        return taken

    def tell(self, proposal, trial):
        self.told.append((proposal, trial))

    def restore(self, trials):
        pass


def alike(space, count):
    """Proposals of valid configs that launch alike."""
    names = space.names()
    points = (dict(zip(names, v, strict=True)) for v in itertools.product(*(p.values for p in space.parameters)))
    found = {}
    for params in (p for p in points if not why_invalid("flash_mma", p)):
        launches = FAMILIES["flash_mma"].launches(PROBLEM, KernelConfig("flash_mma", params), GPU)
        found.setdefault(launches, []).append(Proposal("flash_mma", params))
        if len(found[launches]) == count:
            return found[launches]
    raise ValueError("too few")


@pytest.mark.parametrize("offline", [True, False])
def test_what_renders_and_launches_alike_is_evaluated_once_and_a_resumed_search_knows_it(storage, offline):
    spaces = space_of(BLOCK_M="64", BLOCK_N="64", WARPS="4", STAGES="1", KEY_WARPS="1")
    tools = replace(puppets(), render=lambda *words: replace(render(*words), source="one and the same"))
    study = storage.create_study("fake", PROBLEM, GPU, offline, "random", 0, ("flash_mma",), {}, {})
    proposals = alike(spaces["flash_mma"], 6)
    for part in (proposals[:4], proposals[4:]):
        running = Search(storage, study, PROBLEM, GPU, spaces, Scripted(*part), 2, tools=tools)
        running.run(Budget(trials=99))
        assert running.exhausted and running.progress.recorded == len(part)
    trials = list(storage.iter_trials(study))
    (right,) = [t for t in trials if t.state in (TrialState.ESTIMATED, TrialState.COMPLETE)]
    assert [t.state for t in trials].count(TrialState.DUPLICATE) == 5 and right.number <= 4
    as_it = f"It renders the same source and launches it as trial {right.number} does."
    on_its_way = "It renders the same source and launches it as a candidate still on its way does."
    assert {t.reason for t in trials[:4]} <= {"", "Never timed.", as_it, on_its_way}
    assert {t.reason for t in trials[4:]} == {as_it}


@pytest.mark.parametrize(
    "device, state", [(DoubtsItself, TrialState.COMPLETE), (AlwaysDoubtsItself, TrialState.WRONG_RESULT)]
)
def test_a_doubtful_verdict_is_asked_for_again_once(storage, device, state):
    """A process that a kernel may have harmed gives no verdict on the next one."""
    running = make_search(storage, space_of(WARPS="4", STAGES="1", KEY_WARPS="1"), puppets(device))
    running.run(Budget(trials=2))
    trials = list(storage.iter_trials(running.study))
    assert [t.state for t in trials] == [state] * 2
    assert {t.reason for t in trials} == ({""} if state is TrialState.COMPLETE else {"Verdict 2."})


def test_a_final_names_its_winner_who_ties_with_it_and_who_left_it(storage):
    running = make_search(storage, space_of(WARPS="4", STAGES="1", KEY_WARPS="1"), puppets(CloseFinals))
    progress = running.run(Budget(trials=5))
    leaders = [t.number for t in storage.leaderboard(running.study, 9)]
    assert progress.best.number == leaders[0] == 2 and leaders[3:] == [5, 1]
    assert progress.tied_with == (3, 4)
    assert progress.notes == ["trial 1 left the final: It needs more device memory than is free."]
    assert storage.refusals(running.study) == {"cudnn": "It needs another head_dim."}


def test_what_cannot_be_is_recorded_and_told_and_costs_nothing_more(storage):
    space = load_space("flash_mma", GPU)
    right = next(c for c in space.starting_configs(PROBLEM) if not why_invalid("flash_mma", c.params))
    wrong = next(w for w in range(2, 9) if w in (2, 8) and why_invalid("flash_mma", right.params | {"WARPS": w}))
    proposals = [
        Proposal("flash_mma", right.params | {"WARPS": wrong}, (), "made up"),
        Proposal("flash_mma", right.params),
    ]
    sampler = Scripted(*proposals)
    study = storage.create_study("fake", PROBLEM, GPU, True, "random", 0, ("flash_mma",), {}, {})
    running = Search(storage, study, PROBLEM, GPU, {"flash_mma": space}, sampler, 1, tools=puppets())
    progress = running.run(Budget(trials=9))
    trials = list(storage.iter_trials(study))
    assert [t.state for t in trials] == [TrialState.INVALID_CONFIG, TrialState.ESTIMATED]
    assert trials[0].reason and trials[0].source_hash is None and trials[0].operator == "made up"
    assert progress.recorded == 2 and progress.measured == 1 and running.exhausted
    assert [(p, t.number) for p, t in sampler.told] == list(zip(proposals, (1, 2), strict=True))


def test_a_small_budget_counts_from_when_the_workers_are_up(storage):
    running = make_search(storage, space_of(WARPS="4", STAGES="1,2", KEY_WARPS="1"), puppets(SlowToStart))
    stages = set()
    progress = running.run(
        Budget(seconds=0.8), lambda: stages.add((running.progress.stage, running.progress.started is None))
    )
    assert progress.measured and storage.leaderboard(running.study, 1)[0].timing.protocol["stage"] == "final"
    assert progress.starting_seconds > 1.5 > progress.busy_share and progress.seconds > 0.4
    assert {("starting workers", True), ("searching", False)} <= stages


def test_what_no_worker_ever_judged_is_not_measured():
    progress = Progress(recorded=3)
    progress.states.update([TrialState.INVALID_CONFIG, TrialState.DUPLICATE, TrialState.COMPILE_ERROR])
    assert (
        not progress.measured
        and not progress.seconds
        and not progress.busy_share
        and not progress.candidates_per_second
    )


def test_a_device_worker_killed_in_the_finals_costs_another_try(storage, tmp_path, monkeypatch):
    monkeypatch.setenv("DEATHS", str(tmp_path))
    running = make_search(storage, {"flash_mma": load_space("flash_mma", GPU)}, puppets(DiesInFinals), jobs=2)
    assert running.run(Budget(trials=4)).recorded == 4
    assert [len((tmp_path / kind).read_text()) for kind in ("peers", "final")] == [2, 1]
    assert storage.leaderboard(running.study, 1)[0].timing.protocol["stage"] == "final"


def test_a_finalist_that_kills_the_worker_leaves_the_final_and_the_leaderboard(storage):
    running = make_search(storage, space_of(WARPS="4", STAGES="1,2", KEY_WARPS="1"), puppets(DiesOfAFinalist))
    study = running.study
    progress = running.run(Budget(trials=3))
    out = storage.trial(1)
    assert (
        out.disqualified
        and "exit code 3. So it did 2 times" in progress.notes[0]
        and progress.notes[0].startswith("trial 1 left the final")
    )
    assert out.timing.protocol["stage"] == "screen" and not out.timings[-1].samples_us
    leaders = storage.leaderboard(study, 9)
    assert {t.number for t in leaders} == {2, 3} and all(t.timing.protocol["stage"] == "final" for t in leaders)
    storage.add_timing(leaders[0].number, Timing.out("It needs more device memory than is free.", disqualified=False))
    assert [t.number for t in storage.leaderboard(study, 9)] == [t.number for t in leaders]
    shown = io.StringIO()
    print_trial(storage, out, Console(file=shown, width=200))
    assert "none: The worker process ended with exit code 3" in shown.getvalue()


def test_the_best_starting_config_takes_part_in_the_final(storage):
    space = load_space("flash_mma", GPU)
    study = storage.create_study("fake", PROBLEM, GPU, False, "random", 0, ("flash_mma",), {}, {})
    proposals = make_sampler("random", {"flash_mma": space}, PROBLEM, 0, why_invalid).ask(40)
    started, bred = ([p for p in proposals if (p.operator == STARTING) == which] for which in (True, False))
    numbers = {}
    for us, proposal in enumerate([*bred[:10], *started[:2]], 10):
        config = space.make_config(proposal.params)
        timing = Timing((float(us),), {"stage": "screen", "run": str(us)})
        candidate = render(FAMILIES["flash_mma"], PROBLEM, config, GPU)
        evaluation = Evaluation(TrialState.COMPLETE, timings=(timing,))
        numbers[us] = str(storage.record(study, config, candidate, evaluation, (), proposal.operator).number)

    def chosen():
        return list(finalists.choose(storage, study, PROBLEM, GPU, {"flash_mma": space}, puppets()))

    assert chosen() == [numbers[us] for us in (*range(10, 10 + finalists.FINALISTS), 20)]
    storage.add_timing(int(numbers[20]), Timing((99.0,), {"stage": "repeat", "run": "slow"}))
    assert chosen()[-1] == numbers[21]
    storage.add_timing(
        int(numbers[21]), Timing((1.0,), {"stage": "final", "run": "f"})
    )  # among the best: no extra seat
    assert chosen() == [numbers[us] for us in (21, *range(10, 9 + finalists.FINALISTS))]
    storage.add_timing(int(numbers[21]), Timing((1.0,), {"stage": "final", "run": "f", "disqualified": "It lies."}))
    assert chosen()[-1] == numbers[20]


def test_a_finished_search_is_not_overrun_and_repeats_nothing(storage):
    """Starting again on the same records: the sampler forgot nothing, the table of what ran holds every trial."""

    def run(trials):
        running = make_search(storage, space_of(WARPS="4"), puppets(), jobs=2, offline=True)
        running.run(Budget(trials=trials))
        return running

    run(5)
    again = run(4)
    trials = list(storage.iter_trials(again.study))
    assert len(trials) == 9 == len({t.config_id for t in trials})
    assert {t.state for t in trials} == {TrialState.ESTIMATED}


def start(db, *words):
    command = [
        sys.executable,
        "-m",
        "evoattn.cli.main",
        "search",
        "--gpu",
        "l4",
        "--jobs",
        "2",
        "--db",
        str(db),
        *words,
    ]
    return subprocess.Popen(
        command,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def recorded(db) -> list[str]:
    """Config ids of the trials recorded so far."""
    try:
        with sqlite3.connect(f"file:{db}?mode=ro", uri=True, timeout=10) as connection:
            return [row[0] for row in connection.execute("select config_id from trials order by number")]
    except sqlite3.OperationalError:
        return []


def workers_of(pid: int) -> list[int]:
    """The process's workers; other children of it, such as git and multiprocessing's resource tracker, are left out."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    return [child for child in children if "spawn_main" in command_of(child)]


def command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


@pytest.mark.slow
def test_ctrl_c_while_workers_start_ends_the_search(tmp_path):
    process = start(tmp_path / "db.sqlite", "--budget", "10m", "--study", "early", "--shape", "B=1,H=1,S=64,D=16")
    wait_until(lambda: "No CUDA device" in process.stdout.readline())
    wait_until(lambda: workers_of(process.pid))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0 and "Done (interrupted): " in output, output


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_search_keeps_its_trials_and_resumes(tmp_path, how):
    db = tmp_path / "db.sqlite"
    process = start(db, "--budget", "10m", "--study", "stopped", "--shape", "B=1,H=1,S=64,D=16")
    wait_until(lambda: len(recorded(db)) >= 4)
    workers = workers_of(process.pid)
    process.send_signal(how)
    output, _ = process.communicate(timeout=30)
    before = recorded(db)
    assert len(before) >= 4 and len(set(before)) == len(before)
    if how == signal.SIGINT:
        assert process.returncode == 0 and "interrupted" in output and "Leaderboard" in output
    assert workers
    wait_until(lambda: not any(map(lives, workers)), 10)  # no worker outlives the search
    resumed = start(db, "--budget", "3trials", "--resume", "--jobs", "1")
    assert resumed.wait(timeout=120) == 0
    after = recorded(db)
    assert after[: len(before)] == before and len(after) == len(before) + 3 == len(set(after))
    assert sqlite3.connect(db).execute("pragma integrity_check").fetchone() == ("ok",)
