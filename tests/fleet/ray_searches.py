"""Searches by made-up workers on a Ray cluster."""

from evoattn.model.paths import ROOT
from evoattn.samplers.base import SamplerSetup
from evoattn.samplers.registry import make_sampler
from evoattn.search.request import SearchPlan
from evoattn.search.study import Search
from tests.search.studies_of_fakes import GPU, PROBLEM, space_of, why_invalid

FOLDERS = [ROOT]
"""From which nodes import the made-up workers."""
TRIALS = 60


def search(storage, fleet, offline, tools):
    spaces = space_of(WARPS="4,8", STAGES="1,2", KEY_WARPS="1")
    study = storage.create_study("ray", PROBLEM, GPU, offline, "random", 0, tuple(spaces), {}, {})
    return Search(
        storage,
        study,
        SearchPlan(PROBLEM, GPU, None, spaces),
        make_sampler("random", SamplerSetup(spaces, 0, why_invalid)),
        fleet,
        tools=tools,
    )


def held(storage, running, state):
    """All trials are there once, and right."""
    trials = list(storage.iter_trials(running.study))
    assert [t.state for t in trials] == [state] * TRIALS and len({t.config_id for t in trials}) == TRIALS
    return trials
