"""The contract of every sampler, on made-up families; the pool they draw from, whom the genetic one breeds, what TPE is
told."""

import random
import statistics
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState as OptunaState

from evoattn.model.records import Proposal, Trial, TrialState
from evoattn.model.space import Parameter, config_id
from evoattn.samplers.base import ConfigPool, SamplerSetup
from evoattn.samplers.genetic import POPULATION, GeneticSampler
from evoattn.samplers.random import RandomSampler
from evoattn.samplers.registry import SamplerError, make_sampler
from evoattn.samplers.tpe import STARTUP, TpeSampler
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
    trials = search(name, seed=1, count=200)
    assert len({t.config_id for t in trials}) == 200
    for t in trials:
        SPACES[t.family].make_config(t.config)
        assert why_invalid(t.family, t.config) is None
    assert {t.family for t in trials} == set(SPACES)


@pytest.mark.slow
@every_sampler
def test_same_seed_and_results_give_the_same_search(name):
    once, again = search(name, 3, 80), search(name, 3, 80)
    assert [t.config_id for t in once] == [t.config_id for t in again]
    assert [t.config_id for t in once[:20]] != [t.config_id for t in search(name, 4, 20)]


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


@pytest.mark.slow
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
    learnt, learn = [], sampler._learn
    sampler._learn = lambda trial: (learnt.append(trial.config_id), learn(trial))
    sampler.restore(recorded)
    assert learnt == [config_id("tiny", params | {"YOUNG": False}) for params in old]
    seen = {tuple(p.params.values()) for _ in range(30) for p in sampler.ask(1)}
    assert len(seen) == 4 * 3 * 2 - 2 and not seen & {(1, 1, False), (2, 3, False)}


@pytest.mark.slow
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


@settings(max_examples=15)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), modulus=st.integers(1, 5), seed=st.integers(0, 99))
@pytest.mark.slow
def test_a_pool_gives_each_valid_config_once_and_no_other(sizes, modulus, seed):
    family = {"f": space("f", *[tuple(range(n)) for n in sizes])}

    def wrong(_, params):
        return f"TILE={params['TILE']} is wrong." if sum(params.values()) % modulus else None

    pool = ConfigPool(family, wrong, random.Random(seed))
    drawn = []
    while claimed := pool.draw():
        drawn.append(tuple(claimed[1].values()))
    every = [()]
    for n in sizes:
        every = [(*head, i) for head in every for i in range(n)]
    assert sorted(drawn) == sorted(values for values in every if sum(values) % modulus == 0)
    assert set(pool.rejected) <= {"TILE=N is wrong."}


def test_a_mutated_value_is_mostly_the_next_one():
    pool = ConfigPool({"f": space("f", tuple(range(8)))}, lambda family, params: None, random.Random(1))
    for value, neighbours in ((4, (3, 5)), (0, (1,)), (7, (6,))):
        drawn = [pool.mutate("f", {"TILE": value})["TILE"] for _ in range(2000)]
        for other in range(8):
            share = 0.3 / 8 + (0.7 / len(neighbours) if other in neighbours else 0)
            assert drawn.count(other) / 2000 == pytest.approx(share, abs=0.035)


def test_a_value_that_the_space_does_not_have_is_mutated_to_any_that_it_has():
    pool = ConfigPool({"f": space("f", (1, 2, 4))}, lambda family, params: None, random.Random(1))
    assert {pool.mutate("f", {"TILE": 3})["TILE"] for _ in range(60)} == {1, 2, 4}


def test_one_parameter_is_mutated_on_average():
    pool = ConfigPool({"f": space("f", *[tuple(range(50))] * 5)}, lambda family, params: None, random.Random(1))
    start = dict.fromkeys(pool.spaces["f"].names(), 25)
    changes = [sum(v != 25 for v in pool.mutate("f", start).values()) for _ in range(2000)]
    assert statistics.mean(changes) == pytest.approx(1.0, abs=0.06) and 0 in changes and max(changes) > 2


def generation_of_right_trials(name: str = "random"):
    """`POPULATION` right trials, numbered from 1."""
    right = [t for t in search(name, 1, 2 * POPULATION) if t.timing][:POPULATION]
    return [trial(n, Proposal(t.family, t.config)) for n, t in enumerate(right, 1)]


def test_a_full_generation_is_bred_from_at_once_and_its_children_only_when_they_are_as_many():
    sampler = GeneticSampler(SamplerSetup(SPACES, 0, why_invalid))
    sampler.restore(generation_of_right_trials())
    number, early = POPULATION, []
    while number < 2 * POPULATION - 1:
        (proposal,) = sampler.ask(1)
        number += 1
        early.append(proposal)
        sampler.tell(proposal, trial(number, proposal))
    bred = [p for p in early if p.parents]
    assert len(bred) > 0.75 * len(early)
    assert all(parent <= POPULATION for p in bred for parent in p.parents)
    (last,) = sampler.ask(1)
    sampler.tell(last, trial(number + 1, last))
    assert any(parent > POPULATION for p in sampler.ask(20) for parent in p.parents)


def test_a_failure_is_no_parent_and_fills_no_generation():
    sampler = GeneticSampler(SamplerSetup(SPACES, 0, why_invalid))
    sampler.restore(generation_of_right_trials()[1:])
    for number in range(POPULATION + 1, POPULATION + 30):
        (proposal,) = sampler.ask(1)
        assert not proposal.parents
        sampler.tell(proposal, trial(number, proposal, TrialState.TIMEOUT))
    (proposal,) = sampler.ask(1)
    sampler.tell(proposal, trial(99, proposal))
    parents = {parent for p in sampler.ask(30) for parent in p.parents}
    assert parents and parents <= {*range(2, POPULATION + 1), 99}


def test_four_in_five_children_have_two_parents():
    sampler = GeneticSampler(SamplerSetup(SPACES, 0, lambda family, params: None))
    sampler.restore(generation_of_right_trials())
    operators = [p.operator for p in sampler.ask(600)]
    assert operators.count("random") / 600 == pytest.approx(0.1, abs=0.04)
    assert operators.count("mutation") / 600 == pytest.approx(0.9 * (0.2 + 0.8 * 4 / 3 / POPULATION), abs=0.05)


@pytest.mark.slow
def test_the_better_parents_have_more_children():
    sampler = GeneticSampler(SamplerSetup(SPACES, 0, lambda family, params: None))
    trials = generation_of_right_trials()
    sampler.restore(trials)
    order = [t.number for t in sorted(trials, key=lambda t: t.timing.median_us)]
    places = [order.index(parent) for p in sampler.ask(400) for parent in p.parents]
    assert statistics.mean(places) == pytest.approx(POPULATION / 3, abs=1.0)  # the mean of the lesser of two


def one_family() -> dict:
    return {"round": SPACES["round"]}


def test_the_estimator_is_asked_once_enough_are_right():
    sampler = TpeSampler(SamplerSetup(one_family(), 0, why_invalid))
    states = [TrialState.WRONG_RESULT] * (STARTUP + 4) + [TrialState.COMPLETE] * STARTUP
    for number, state in enumerate(states, 1):
        (proposal,) = sampler.ask(1)
        assert proposal.operator in ("starting", "random")
        sampler.tell(proposal, trial(number, proposal, state))
    assert [p.operator for p in sampler.ask(5)] == ["tpe"] * 5


def told(sampler: TpeSampler) -> list[OptunaState]:
    """What Optuna holds of the family `round`, but for the trials that were drawn and not begun."""
    trials = sampler._estimators["round"]._study.get_trials(deepcopy=False)
    return [t.state for t in trials]


def test_optuna_is_told_what_is_under_way_what_failed_and_nothing_of_duplicates():
    sampler = TpeSampler(SamplerSetup(one_family(), 0, why_invalid))
    proposals = sampler.ask(4)
    assert told(sampler) == [OptunaState.RUNNING] * 4
    ends = (TrialState.COMPLETE, TrialState.DUPLICATE, TrialState.LAUNCH_ERROR)
    for number, (proposal, end) in enumerate(zip(proposals, ends), 1):
        sampler.tell(proposal, trial(number, proposal, end))
    assert told(sampler) == [OptunaState.COMPLETE, OptunaState.FAIL, OptunaState.PRUNED, OptunaState.RUNNING]


def test_a_small_space_is_gone_through_point_by_point(monkeypatch):
    monkeypatch.setattr("evoattn.samplers.base.FRUITLESS_DRAWS", 0)
    only = {"TILE": 3, "f_1": 2}
    for seed in range(6):
        pool = ConfigPool(
            {"f": space("f", (1, 2, 3), (1, 2, 3))},
            lambda family, params: None if params == only else "TILE does not go with f_1.",
            random.Random(seed),
        )
        assert pool.draw("f") == ("f", only) and pool.draw("f") is None
