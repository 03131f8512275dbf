"""A node of a Ray cluster that dies. A process has one cluster at a time: this one is not that of `test_ray.py`."""

import os
from dataclasses import replace

import pytest

from evoattn.engine.budget import Budget
from evoattn.fleet.ray_fleet import RayFleet
from evoattn.model.records import TrialState
from tests.fleet.ray_fakes import SlowCompiler
from tests.fleet.ray_searches import FOLDERS, TRIALS, held, search
from tests.search.studies_of_fakes import fakes


@pytest.mark.slow
def test_a_node_that_dies_gives_its_candidates_back(storage, monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed (evoattn[ray])")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, FOLDERS)))
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 << 20})
    other = nodes.add_node(num_cpus=2, object_store_memory=100 << 20)
    fleet = RayFleet(nodes.address, jobs=3)
    try:
        running = search(storage, fleet, True, replace(fakes(), make_compiler=SlowCompiler))
        removed = []

        def refresh():
            if not removed and running.progress.recorded >= 10:
                removed.append(other)
                nodes.remove_node(other, allow_graceful=False)

        running.run(Budget(trials=TRIALS), refresh)
        assert removed
        held(storage, running, TrialState.ESTIMATED)
    finally:
        fleet.stop()
        nodes.shutdown()
