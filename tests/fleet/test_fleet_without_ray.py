"""What a fleet asks of a cluster, and makes of its answers: of one that is made up, as Ray need not be installed."""

from __future__ import annotations

import os
import pickle
import sys
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import pytest

from evoattn.evaluation.process import Ending, Handler
from evoattn.evaluation.workers import START_TRIES, BaseWorker, WorkerFailed
from evoattn.fleet import base, ray_fleet, ray_node, ray_worker
from evoattn.fleet.facts import NodeDiffers, _hash, facts_here
from evoattn.fleet.ray_fleet import FREE_SECONDS, RayFleet
from evoattn.fleet.ray_node import packed
from evoattn.fleet.ray_worker import GONE_SECONDS, START_SECONDS, RayBoard, RayCompiler, RayWorker
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import DetectedDevice
from evoattn.model.paths import SEARCH_SPACES
from tests.fleet import fake_cluster


class Doubles(Handler):
    """A handler of nodes; a text is more than it can."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, task):
        return self.factor * task if isinstance(task, int) else task.no_such_thing


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setattr(ray_node, "_handlers", {})
    return fake_cluster.put(monkeypatch)


@pytest.fixture
def clock(monkeypatch):
    """Its one number is the time."""
    now = [100.0]
    monkeypatch.setattr(ray_worker, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def compiler(cluster):
    (worker,) = RayCompiler.pool(1, packed((Doubles, (2,), facts_here())))
    assert worker.poll() is None and worker.ready and worker.idle
    return worker


@pytest.mark.parametrize("visible", [None, ("5", "7")])
def test_each_gpu_of_a_machine_has_its_process_and_the_first_a_referee(monkeypatch, visible):
    monkeypatch.setattr(base, "Worker", lambda make, args, **words: (make.func, *make.args, args, words))
    monkeypatch.setattr(base, "processes", lambda *words: [words])
    fleet, seen = base.LocalFleet(3, ("2", "4"), visible), visible or ("2", "4")
    assert (fleet.jobs, fleet.boards) == (3, ("2", "4"))
    workers = [(base.on_board, index, Doubles, (1,), {}) for index in seen]
    assert fleet.devices(Doubles, (1,)) == workers and fleet.referee(Doubles, (1,)) == workers[0]
    assert fleet.compilers(Doubles, (1,)) == [(3, Doubles, (1,), False)]
    assert fleet.compilers(Doubles, (1,), beside=True) == [(3, Doubles, (1,), True)]
    with mock.patch.dict(base.os.environ, {base.VISIBLE: "9"}):
        for index, there in (("", "9"), ("5", "5")):
            assert base.on_board(index, Doubles, 4).factor == 4 and base.os.environ[base.VISIBLE] == there


@pytest.mark.parametrize("error", [ConnectionError, OSError, RuntimeError, ValueError])
def test_whatever_a_cluster_refuses_with_is_one_short_sentence(cluster, error):
    cluster.refuses = error("no " * 100)
    with pytest.raises(FailedRun) as raised:
        RayFleet("x")
    assert str(raised.value) == "The Ray cluster 'x' does not answer: " + ("no " * 100)[:200]


def test_a_cluster_that_names_no_cores_has_one(cluster, monkeypatch):
    fleet = RayFleet("x")
    monkeypatch.setattr(fleet, "_ray", SimpleNamespace(cluster_resources=dict))
    assert fleet.jobs == 1 and RayFleet("x", jobs=5).jobs == 5


def test_a_cluster_is_asked_for_in_one_way(cluster):
    RayFleet("ray://there")
    RayFleet("local", size={"num_cpus": 3})
    first, second = cluster.asked("init")
    usual = {"log_to_driver": False, "logging_level": 40, "namespace": "evoattn"}
    assert first == {"address": "ray://there", **usual}
    base = {"include_dashboard": False, "object_store_memory": ray_fleet.STORE_BYTES, "num_cpus": 3}
    assert second == {"address": "local", **base, **usual}
    cluster.refuses = ConnectionError("nobody\n  there")
    with pytest.raises(FailedRun, match=r"The Ray cluster 'x' does not answer: nobody there$"):
        RayFleet("x")


def gpus(*names):
    left = iter(names)
    return lambda: [DetectedDevice(0, "H100", (9, 0), "13.0", name) for name in [next(left)] if name is not None]


def test_gpus_are_those_whose_actors_answer(cluster):
    fleet = RayFleet("local", find_devices=gpus("GPU-a", None))
    assert fleet.jobs == 4
    assert [device.uuid for device in fleet.detect()] == ["GPU-a"] and fleet.boards == ("GPU-a",)
    assert cluster.asked("wait") == [(2, FREE_SECONDS)] and fleet.jobs == 3
    assert {"num_gpus": 1, "num_cpus": 1, "max_restarts": 0} in cluster.asked("remote")
    assert len(cluster.asked("kill")) == 1, "the actor without a GPU ends"
    assert cluster.asked("on") == [("one", False)] and {"num_cpus": 0} in cluster.asked("remote")
    fleet._find_devices = gpus("", "")
    assert len(fleet.detect()) == 2 and fleet.boards == ("0", "1") and len(cluster.asked("kill")) == 2
    cluster.held = {"describe"}
    with pytest.raises(FailedRun, match="None of the 2 GPUs of the Ray cluster is free"):
        fleet.detect()
    cluster.resources = {"CPU": 2.0}
    assert fleet.detect() == [] and RayFleet("local", jobs=7).jobs == 7
    cluster.resources = {}
    assert fleet.jobs == 1
    fleet.stop()
    assert cluster.asked("shutdown") and fleet.referee(Doubles, ()) is None


def test_a_node_that_differs_is_named(cluster, monkeypatch):
    fleet = RayFleet("local")
    monkeypatch.setattr(ray_fleet, "node_facts", other := lambda: ("far", {**facts_here(), "compiler": "1"}))
    other.__name__ = "node_facts"
    with pytest.raises(NodeDiffers, match=r"The node far of the Ray cluster differs .* it has compiler 1, not "):
        fleet.detect()
    name, facts = ray_node.node_facts()
    assert name and facts == facts_here()
    words = packed((Doubles, (2,), facts_here() | {"code": "0"}))
    for call in (lambda: ray_node.answer(words, None), lambda: ray_node.Board().start(words)):
        with pytest.raises(NodeDiffers, match="it has code "):
            call()


def test_compiles_are_tasks_on_any_node(cluster):
    fleet = RayFleet("local", jobs=2)
    workers = fleet.compilers(Doubles, (3,))
    assert len(workers) == 2 and {"num_cpus": 1, "max_retries": 0} in cluster.asked("remote")
    assert all(worker._siblings is workers for worker in workers)
    one, other = workers
    assert one.poll() is None and one.idle and one.connection.poll() is False
    one.submit("tag", 5, 10.0)
    assert one.busy and one.connection.poll()
    outcome = one.poll()
    assert (outcome.tag, outcome.ending, outcome.value) == ("tag", Ending.RESULT, 15) and one.idle
    one.submit("again", "text", 10.0)
    outcome = one.poll()
    assert outcome.ending is Ending.RAISED and "no_such_thing" in outcome.value and one.ready
    assert len(ray_node._handlers) == 1, "a process keeps its handler"
    other.stop()
    one.stop()
    one._ring()  # which listens no more


def test_an_answer_that_does_not_come_is_no_answer(cluster, clock):
    worker = compiler(cluster)
    cluster.held = {"answer"}
    worker.submit("slow", 1, 10.0)
    clock[0] += 10 + START_SECONDS - 0.5
    assert worker.poll() is None and worker.busy
    clock[0] += 1
    outcome = worker.poll()
    assert (outcome.ending, outcome.tag) == (Ending.TIMEOUT, "slow") and not worker.ready and not worker.idle
    ((ref, force),) = cluster.asked("cancel")
    assert force and ref is cluster.waiting[0]
    assert len(cluster.asked("answer")) == 3 and cluster.asked("answer")[-1][1] is None, "it is started anew"
    cluster.waiting[1].of.set_result(ray_node.READY)
    assert worker.poll() is None and worker.idle and worker.poll() is None


LOST = ("NodeDied", "LocalRayletDied", "OwnerDied", "ObjectLost", "ActorDied", "ActorUnavailable")


@pytest.mark.parametrize(
    "name, ending", [*((n, Ending.LOST) for n in LOST), ("WorkerCrashed", Ending.DIED), ("OutOfMemory", Ending.DIED)]
)
def test_what_ends_a_task_is_told_apart(cluster, name, ending):
    worker = compiler(cluster)
    cluster.held = {"answer"}
    worker.submit("t", 1, 10.0)
    cluster.waiting[0].of.set_exception(getattr(cluster.exceptions, f"{name}Error")("it ended"))
    outcome = worker.poll()
    assert outcome.ending is ending and f"{name}Error: it ended" in outcome.value and not worker.ready
    assert len(cluster.waiting) == 2 and worker.failures_to_start == 0


def test_what_a_task_raises_is_said_and_a_start_that_fails_counts(cluster, clock):
    worker = compiler(cluster)
    cluster.held = {"answer"}
    worker.submit("t", 1, 10.0)
    cluster.waiting[0].of.set_exception(fake_cluster.RayTaskError(ValueError("odd")))
    assert worker.poll().value == "ValueError: odd" and worker.ready and len(cluster.waiting) == 1
    worker.ready = False
    worker._start()
    for tries in range(START_TRIES):
        worker.check()
        cluster.waiting[-1].of.set_exception(fake_cluster.RayTaskError(OSError("no room")))
        assert worker.poll() is None and worker.failures_to_start == tries + 1
    assert len(cluster.waiting) == 1 + START_TRIES, "then it is not started again"
    with pytest.raises(WorkerFailed, match="OSError: no room"):
        worker.check()
    worker.failures_to_start = 0
    worker._start()
    cluster.waiting[-1].of.set_exception(cluster.exceptions.NodeDiedError("gone"))
    assert worker.poll() is None and worker.failures_to_start == 0, "no fault of the start"
    clock[0] += GONE_SECONDS
    worker.check()
    clock[0] += 1
    with pytest.raises(WorkerFailed, match="No node of the Ray cluster has taken work for 300 s"):
        worker.check()
    cluster.waiting[-1].of.set_exception(fake_cluster.RayTaskError(NodeDiffers("The node x differs")))
    with pytest.raises(NodeDiffers, match=r"^The node x differs$"):
        worker.poll()


class Below:
    """In place of a node's worker process."""

    made: ClassVar[list[Below]] = []

    def __init__(self, make_handler, args):
        self.handler, self.stopped = make_handler(*args), False
        Below.made.append(self)

    def wait(self):
        self.waited = True

    def stop(self):
        self.stopped = True

    def ask(self, task, seconds):
        if task == "die":
            raise WorkerFailed("it will not start")
        return SimpleNamespace(ending=Ending.RESULT, value=(self.handler(task), seconds), doing="that")


def test_a_board_has_a_process_that_may_be_killed(cluster, clock, monkeypatch):
    monkeypatch.setattr(ray_node, "Worker", Below)
    Below.made.clear()
    fleet = RayFleet("local", find_devices=gpus("a", "b"))
    fleet.detect()
    boards = fleet.devices(Doubles, (4,))
    assert len(boards) == 2 == len(Below.made) and all(below.waited for below in Below.made)
    one, other = boards
    assert one.poll() is None and one.idle and other.poll() is None
    one.submit("t", 2, 30.0)
    outcome = one.poll()
    assert (outcome.value, outcome.doing, outcome.tag) == ((8, 30.0), "that", "t")
    one.submit("t", "die", 30.0)
    outcome = one.poll()
    assert (outcome.ending, outcome.value) == (Ending.DIED, "it will not start") and one.ready
    board = ray_node.Board()
    assert pickle.loads(board.start(packed((Doubles, (1,), facts_here())))) == (Ending.RESULT, None, "")
    board.start(packed((Doubles, (1,), facts_here())))
    assert Below.made[-2].stopped and not Below.made[-1].stopped
    assert board.describe(gpus("z")).uuid == "z" and board.describe(list) is None
    cluster.held = {"run"}
    before, kills = one.actor, len(cluster.asked("kill"))
    one.submit("slow", 1, 30.0)
    clock[0] += 30 + START_SECONDS + 1
    assert one.poll().ending is Ending.TIMEOUT and one.actor is not before
    assert cluster.asked("kill")[kills:] == [before, before] and one.poll() is None and one.ready
    assert RayBoard.several(boards) is boards


class Worker(RayWorker):
    """Of no cluster."""

    def __init__(self):
        BaseWorker.__init__(self)
        self._siblings, self._since = (self,), 0.0

    def submit(self, tag, task, seconds): ...

    def stop(self): ...

    def _start(self): ...

    def _forget(self): ...


def test_ray_sends_nothing_home(monkeypatch):
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FailedRun, match="needs Ray"):
        RayFleet("local")
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_one_worker_that_is_up_is_enough():
    workers = Worker.several([Worker(), Worker()])
    workers[0].ready, workers[1].failures_to_start = True, START_TRIES
    for worker in workers:
        worker.check()
    workers[0].ready = False
    with pytest.raises(WorkerFailed, match="failed to start"):
        workers[1].check()
    with pytest.raises(WorkerFailed, match="has taken work"):
        workers[0].check()


@pytest.mark.parametrize("jobs, boards, expected", [(None, 3, 5), (None, 9, 1), (None, 0, 8), (2, 3, 2)])
def test_each_gpu_s_actor_has_a_core_of_its_own(jobs, boards, expected):
    fleet = RayFleet.__new__(RayFleet)
    fleet._ray, fleet._jobs, fleet._boards = SimpleNamespace(cluster_resources=lambda: {"CPU": 8.0}), jobs, [0] * boards
    assert fleet.jobs == expected


def test_search_spaces_have_to_be_alike(tmp_path):
    assert _hash(SEARCH_SPACES, "*.yaml") in facts_here()["templates"]
    (tmp_path / "a.yaml").write_text("1")
    one = _hash(tmp_path, "*.yaml")
    (tmp_path / "a.yaml").write_text("2")
    two = _hash(tmp_path, "*.yaml")
    (tmp_path / "a.yaml").rename(tmp_path / "b.yaml")
    assert len({one, two, _hash(tmp_path, "*.yaml")}) == 3
