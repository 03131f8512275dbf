"""Faults that once passed the tests of fleets, which need no cluster to be seen."""

import os
import sys
from types import SimpleNamespace

import pytest

from evoattn.evaluation.workers import START_TRIES, BaseWorker, WorkerFailed
from evoattn.fleet.facts import _hash, facts_here
from evoattn.fleet.ray_fleet import RayFleet
from evoattn.fleet.ray_worker import RayWorker
from evoattn.model.errors import FailedRun
from evoattn.model.paths import SEARCH_SPACES


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
