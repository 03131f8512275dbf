"""A search on a Ray cluster of this machine: what dies gives its candidates back, and who differs is refused."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from evoattn.engine.budget import Budget
from evoattn.evaluation.process import Ending
from evoattn.fleet.facts import NodeDiffers, facts_here, require_alike
from evoattn.fleet.ray_fleet import RayFleet
from evoattn.fleet.ray_node import packed
from evoattn.model.paths import ROOT
from evoattn.model.records import TrialState
from tests.fleet.ray_fakes import DiesOnce, FakeRayBoard, SlowCompiler, made_up_gpus
from tests.fleet.ray_searches import FOLDERS, TRIALS, held, search
from tests.search.studies_of_fakes import fakes


@pytest.fixture(scope="module")
def cluster():
    """Two cores for compiles and two made-up GPUs."""
    pytest.importorskip("ray", reason="Ray is not installed (evoattn[ray])")
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, FOLDERS))  # nodes import the fakes too
    fleet = RayFleet("local", jobs=2, size={"num_cpus": 4, "num_gpus": 2}, find_devices=made_up_gpus)
    yield fleet
    fleet.stop()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def children(pid: int) -> dict[int, str]:
    """Command lines by process, of all that descend from `pid`."""
    found, left = {}, [pid]
    while left:
        try:
            kids = Path(f"/proc/{(parent := left.pop())}/task/{parent}/children").read_text().split()
            for kid in map(int, kids):
                found[kid] = command_of(kid)
                left.append(kid)
        except OSError:
            continue
    return found


def command_of(pid: int) -> str:
    """Empty for a zombie."""
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def wait_until(condition, seconds: float = 100.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def is_worker(pid: int) -> bool:
    """Whether it is no server from which workers are forked."""
    return "forkserver" not in command_of(pid) or not children(pid)


def killing(running, *names: str):
    """Kill -9 a process of each name, once some trials are recorded; those killed are in the list."""
    killed = []

    def refresh():
        if len(killed) < len(names) and running.progress.recorded >= 10 * (len(killed) + 1):
            name = names[len(killed)]
            pid = next((pid for pid, c in children(os.getpid()).items() if name in c and is_worker(pid)), None)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                killed.append(name)

    return killed, refresh


@pytest.mark.slow
def test_a_killed_compile_worker_gives_its_candidate_back(storage, cluster):
    running = search(storage, cluster, True, replace(fakes(), make_compiler=SlowCompiler))
    killed, refresh = killing(running, "ray::answer")
    progress = running.run(Budget(trials=TRIALS), refresh)
    assert killed and progress.recorded == TRIALS
    held(storage, running, TrialState.ESTIMATED)


@pytest.mark.slow
def test_boards_of_a_cluster_are_compared_and_a_killed_one_gives_its_candidate_back(storage, cluster):
    found = cluster.detect()
    assert sorted(cluster.boards) == ["made up-1.0", "made up-1.1"] and len(found) == 2
    running = search(storage, cluster, False, fakes(FakeRayBoard))
    killed, refresh = killing(running, "ray::Board", "forkserver")
    progress = running.run(Budget(trials=TRIALS), refresh)
    assert killed == ["ray::Board", "forkserver"] and progress.boards == 2
    trials = held(storage, running, TrialState.COMPLETE)
    assert len({t.timings[0].protocol["board"] for t in trials}) == 2
    ratio = progress.speeds["made up-1.1"] / progress.speeds["made up-1.0"]
    assert ratio == pytest.approx(1.1) and storage.leaderboard(running.study, 1)[0].timing.protocol["stage"] == "final"
    wait_until(lambda: not any(c.startswith("ray::Board") for c in children(os.getpid()).values()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compilers", "devices"])
def test_a_worker_of_a_cluster_ends_its_tasks_as_one_of_this_machine(cluster, kind):
    cluster.detect()
    worker, *others = getattr(cluster, kind)(DiesOnce, ())
    try:
        first = worker.ask("echo", 20.0)
        assert first.ending is Ending.RESULT and first.value[0] == "echo"
        died = worker.ask("die", 20.0)
        assert died.ending is Ending.DIED and "ended" in died.value
        raised = worker.ask("raise", 20.0)
        assert raised.ending is Ending.RAISED and raised.value == "ValueError: bad luck"
        again = worker.ask("echo", 20.0)
        # Ray gives a compile to any of its processes, which may be one from before the death.
        assert again.ending is Ending.RESULT and (kind == "compilers" or again.value[1] != first.value[1])
    finally:
        for one in (worker, *others):
            one.stop()


@pytest.mark.slow
def test_a_node_with_another_compiler_is_refused(cluster):
    from evoattn.fleet.ray_worker import RayCompiler

    (worker,) = RayCompiler.pool(1, packed((DiesOnce, (), facts_here() | {"compiler": "NVRTC 99.9"})))
    try:
        with pytest.raises(NodeDiffers, match=r"it has compiler NVRTC .* not NVRTC 99\.9"):
            worker.wait()
    finally:
        worker.stop()


def test_what_differs_is_named_with_both_values():
    here = facts_here()
    assert set(here) == {"evoattn", "compiler", "templates", "code"} and all(here.values())
    require_alike("n1", here, here)
    with pytest.raises(NodeDiffers, match=r"^The node n1 .* it has templates old, not .*; code absent, not .*\.$"):
        require_alike("n1", {k: v for k, v in here.items() if k != "code"} | {"templates": "old"}, here)


@pytest.mark.slow
def test_ctrl_c_leaves_no_process(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed (evoattn[ray])")
    words = [
        "search",
        "--gpu",
        "l4",
        "--ray",
        "local",
        "--jobs",
        "2",
        "--db",
        str(tmp_path / "db.sqlite"),
        "--budget",
        "10m",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "evoattn", *words, "--shape", "B=1,H=1,S=64,D=16"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell ignores Ctrl-C for what it puts in the background, as the tests may be.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until(lambda: any(c.startswith("ray::answer") for c in children(process.pid).values()), 900.0)
    started = children(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and "Done (interrupted)" in output, output
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() and command_of(pid) for pid in started))
