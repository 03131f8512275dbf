"""The contract of every sampler, on made-up families."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from evoattn.model.records import Proposal, Trial, TrialState
from evoattn.model.space import Parameter, config_id
from evoattn.samplers.base import SamplerSetup
from evoattn.samplers.random import RandomSampler
from evoattn.samplers.registry import SamplerError, make_sampler
from tests.samplers.made_up_families import SPACES, every_sampler, search, space, trial, typical, why_invalid


@pytest.mark.parametrize("name", ["anneal", "forest", "local", "mixed"])
def test_an_unknown_sampler_is_one_sentence(name):
    with pytest.raises(SamplerError, match=rf"Unknown sampler '{name}'; evoattn has guided, genetic, tpe, random\."):
        make_sampler(name, SamplerSetup(SPACES, 0, why_invalid))


@every_sampler
def test_starting_configs_come_first_an_invalid_one_mended(name):
    proposals = make_sampler(name, SamplerSetup(SPACES, 0, why_invalid)).ask(3)
    config = SPACES["round"].starting[0]
    assert why_invalid("round", config) and not why_invalid("round", proposals[0].params)
    assert [p.operator for p in proposals] == ["starting", "random", "random"]
    assert make_sampler(name, SamplerSetup(SPACES, 0, lambda family, params: None)).ask(1)[0].params == config


@pytest.mark.slow
@every_sampler
def test_all_others_are_valid_and_none_comes_twice(name):
    trials = search(name, seed=1, count=400)
    assert len({t.config_id for t in trials}) == 400
    for t in trials:
        SPACES[t.family].make_config(t.config)
        assert why_invalid(t.family, t.config) is None
    assert {t.family for t in trials} == set(SPACES)


@pytest.mark.slow
@every_sampler
def test_same_seed_and_results_give_the_same_search(name):
    once, again = search(name, 3, 120), search(name, 3, 120)
    assert [t.config_id for t in once] == [t.config_id for t in again]
    assert [t.config_id for t in once] != [t.config_id for t in search(name, 4, 120)]


@pytest.mark.slow
@every_sampler
def test_resume_repeats_nothing_and_goes_on_from_the_best(name):
    first = tuple(search(name, 5, 300))
    then = search(name, 5, 60, recorded=first)
    assert not {t.config_id for t in first} & {t.config_id for t in then}
    assert "starting" not in {t.operator for t in then}
    if name != "random":
        assert typical(then) < typical(search("random", 5, 60))


@every_sampler
def test_recorded_trials_of_other_spaces_do_no_harm(name):
    old = trial(1, Proposal("round", {"TILE": 7, **{f"round_{i}": 7 for i in range(1, 6)}}, operator="starting"))
    gone = [
        old.__class__(**{**old.__dict__, "number": n, "family": family, "config": config, "config_id": str(n)})
        for n, family, config in ((2, "unknown", {"A": 1}), (3, "round", {"TILE": 99}))
    ]
    sampler = make_sampler(name, SamplerSetup(SPACES, 0, why_invalid))
    sampler.restore([old, *gone])
    assert all(p.operator == "random" for p in sampler.ask(5))  # the starting config is recorded


@every_sampler
def test_configs_recorded_before_a_gene_was_there_have_its_default(name):
    tiny = space("tiny", (1, 2, 3, 4), (1, 2, 3))
    young = replace(tiny, parameters=(*tiny.parameters, Parameter("YOUNG", (False, True), "new", False)))
    measured = search("random", 1, 2)
    old = ({"TILE": 1, "tiny_1": 1}, {"TILE": 2, "tiny_1": 3})
    recorded = [
        replace(t, family="tiny", config=params, config_id=config_id("tiny", params))
        for t, params in zip(measured, old, strict=True)
    ]
    sampler = make_sampler(name, SamplerSetup({"tiny": young}, 0, lambda family, params: None))
    sampler.restore(recorded)
    seen = {tuple(p.params.values()) for _ in range(30) for p in sampler.ask(1)}
    assert len(seen) == 4 * 3 * 2 - 2 and not seen & {(1, 1, False), (2, 3, False)}


@every_sampler
def test_a_small_space_is_used_up_to_the_last_config(name):
    spaces = {"tiny": space("tiny", (1, 2, 3, 4), (1, 2, 3), ("a", "b")), "one": space("one", (1,))}

    def invalid(family, params):
        return "No." if family == "tiny" and (params["TILE"] + params["tiny_1"]) % 3 else None

    sampler = make_sampler(name, SamplerSetup(spaces, 0, invalid))
    seen = []
    while proposals := sampler.ask(3):
        for proposal in proposals:
            seen.append((proposal.family, *proposal.params.values()))
            identity = config_id(proposal.family, proposal.params)
            sampler.tell(
                proposal,
                Trial(
                    len(seen),
                    1,
                    proposal.family,
                    proposal.params,
                    identity,
                    TrialState.ESTIMATED,
                    "",
                    None,
                    None,
                    None,
                    (),
                    float(len(seen)),
                    (),
                    "",
                    "",
                    0.0,
                ),
            )
    assert len(seen) == len(set(seen)) == 1 + sum((a + b) % 3 == 0 for a in (1, 2, 3, 4) for b in (1, 2, 3)) * 2
    assert sampler.ask(1) == []


@every_sampler
@pytest.mark.slow
def test_asking_is_quick_when_there_is_much_history(name):
    sampler = make_sampler(name, SamplerSetup(SPACES, 0, why_invalid))
    sampler.restore(search("random", 1, 1200))
    sampler.ask(1)
    started = time.process_time()
    assert len(sampler.ask(40)) == 40
    assert (time.process_time() - started) / 40 < 0.1  # 0.1 to 3 ms; the rest is for a slow machine


def test_a_resumed_search_draws_other_random_numbers():
    """Else its first configs would be those of the first run, drawn and dropped one after another."""
    spaces = {"f": space("f", *[tuple(range(8))] * 6)}
    fresh, resumed = (RandomSampler(SamplerSetup(spaces, 0, lambda family, params: None)) for _ in range(2))
    resumed.restore([trial(1, Proposal("unknown", {"A": 1}), TrialState.TIMEOUT)])
    assert [p.params for p in fresh.ask(5)] != [p.params for p in resumed.ask(5)]
