"""The loop on workers that misbehave: a death, a hang or a failed compile costs its candidate and no more. The real
command, stopped by `kill -9`, SIGTERM or Ctrl-C: no trial is lost and no worker outlives it."""

import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from evoattn.engine.budget import Budget
from evoattn.engine.loop import EARLY
from evoattn.engine.progress import Progress
from evoattn.families.registry import load_space
from evoattn.model.records import TrialState
from tests.search.search_fakes import AlwaysDoubtsItself, DoubtsItself, SlowToStart, WaitsForAFile, cost
from tests.search.studies_of_fakes import GPU, fakes, make_search, space_of


@pytest.mark.slow
def test_misbehaving_workers_cost_their_candidates_only(storage):
    spaces = {"flash_mma": load_space("flash_mma", GPU)}
    running = make_search(storage, spaces, fakes(compile_seconds=3.0, device_seconds=3.0), jobs=3)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "device, state", [(DoubtsItself, TrialState.COMPLETE), (AlwaysDoubtsItself, TrialState.WRONG_RESULT)]
)
def test_a_doubtful_verdict_is_asked_for_again_once(storage, device, state):
    """A process that a kernel may have harmed gives no verdict on the next one."""
    running = make_search(storage, space_of(WARPS="4", STAGES="1", KEY_WARPS="1"), fakes(device))
    running.run(Budget(trials=2))
    trials = list(storage.iter_trials(running.study))
    assert [t.state for t in trials] == [state] * 2
    assert {t.reason for t in trials} == ({""} if state is TrialState.COMPLETE else {"Verdict 2."})


@pytest.mark.slow
def test_a_small_budget_counts_from_when_the_workers_are_up(storage):
    running = make_search(storage, space_of(WARPS="4", STAGES="1,2", KEY_WARPS="1"), fakes(SlowToStart))
    stages = set()
    progress = running.run(
        Budget(seconds=0.8), lambda: stages.add((running.progress.stage, running.progress.started is None))
    )
    # What a busy machine measures in this time is not asked here.
    assert progress.starting_seconds > 1.0 and progress.seconds > 0.4 and progress.busy_share < 1.2
    assert {("starting workers", True), ("searching", False)} <= stages


@pytest.mark.slow
def test_few_candidates_are_compiled_before_a_device_can_take_them(storage, tmp_path, monkeypatch):
    start = tmp_path / "start"
    monkeypatch.setenv("START", str(start))
    space = space_of(WARPS="4", STAGES="1,2", KEY_WARPS="1")  # of which none hangs
    running = make_search(storage, space, fakes(WaitsForAFile), jobs=8)
    before = []

    def watch():
        if running.progress.started is None:
            before.append(running.progress.compiling + running.progress.ready)
            if before.count(EARLY) >= 10 or len(before) > 3000:
                start.touch()

    assert running.run(Budget(trials=20), watch).recorded >= 20 and max(before) == EARLY


def test_what_no_worker_ever_judged_is_not_measured():
    progress = Progress(recorded=3)
    progress.states.update([TrialState.INVALID_CONFIG, TrialState.DUPLICATE, TrialState.COMPILE_ERROR])
    assert (
        not progress.measured
        and not progress.seconds
        and not progress.busy_share
        and not progress.candidates_per_second
    )


def start(db, *words):
    command = [sys.executable, "-m", "evoattn", "search", "--gpu", "l4", "--jobs", "2", "--db", str(db), *words]
    return subprocess.Popen(
        command,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell ignores Ctrl-C for what it puts in the background, as the tests may be.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def recorded(db) -> list[str]:
    """Config ids of the trials recorded so far."""
    try:
        with sqlite3.connect(f"file:{db}?mode=ro", uri=True, timeout=10) as connection:
            return [row[0] for row in connection.execute("select config_id from trials order by number")]
    except sqlite3.OperationalError:
        return []


def died(db) -> list[str]:
    """Trials whose worker died, as far as is recorded."""
    with sqlite3.connect(db) as connection:
        return [row[0] for row in connection.execute("select state from trials where state = 'WORKER_DIED'")]


def children_of(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except FileNotFoundError:
        return []


def servers_of(pid: int) -> list[int]:
    """The process that its workers are forked from."""
    return [child for child in children_of(pid) if "forkserver" in command_of(child)]


def workers_of(pid: int) -> list[int]:
    return [worker for server in servers_of(pid) for worker in children_of(server)]


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


def wait_until(condition, seconds=600.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


@pytest.mark.slow
def test_an_interrupt_while_workers_start_ends_the_search(tmp_path):
    process = start(tmp_path / "db.sqlite", "--budget", "10m", "--study", "early", "--shape", "B=1,H=1,S=64,D=16")
    wait_until(lambda: "No CUDA device" in process.stdout.readline())
    wait_until(lambda: "workers are starting" in process.stdout.readline())
    servers = servers_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "Done (interrupted): " in output and "Traceback" not in output, output
    assert servers
    wait_until(lambda: not any(map(lives, servers)))


TWICE = """
import os, signal
from evoattn.cli import main
from evoattn.cli.entry import main as command

def interrupted():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        print("kept")
        raise

main.main = interrupted
command()
"""


def test_sigterm_sent_twice_at_once_is_one_interrupt():
    """As `timeout` sends it, to its child and to the group of both."""
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=600)
    assert done.stdout == "kept\n" and done.stderr == "evoattn: Interrupted.\n" and done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_search_keeps_its_trials_and_resumes(tmp_path, how):
    db = tmp_path / "db.sqlite"
    process = start(db, "--budget", "10m", "--study", "stopped", "--shape", "B=1,H=1,S=64,D=16")
    wait_until(lambda: len(recorded(db)) >= 4)
    workers = [*servers_of(process.pid), *workers_of(process.pid)]
    if how == signal.SIGKILL:
        process.send_signal(how)
    else:
        os.killpg(process.pid, how)  # as a terminal does, or `timeout`: the workers get it too
    output, _ = process.communicate(timeout=300)
    before = recorded(db)
    assert len(before) >= 4 and len(set(before)) == len(before)
    if how != signal.SIGKILL:
        assert process.returncode == 0 and "interrupted" in output and "Best kernel: trial" in output, output
        assert "To go on with it:\n  evoattn search --resume --study stopped" in output
    assert len(workers) == 3 and not died(db)
    wait_until(lambda: not any(map(lives, workers)), 100)  # no worker outlives the search
    if how == signal.SIGKILL:  # after which least was put in order
        resumed = start(db, "--budget", "3trials", "--resume", "--jobs", "1")
        assert resumed.wait(timeout=600) == 0
        after = recorded(db)
        assert after[: len(before)] == before and len(after) == len(before) + 3 == len(set(after))
    assert sqlite3.connect(db).execute("pragma integrity_check").fetchone() == ("ok",)
