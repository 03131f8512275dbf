"""The contract of every sampler, on made-up families: no kernels, no database."""

from __future__ import annotations

import math
import random
import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Proposal, Timing, Trial, TrialState
from evoattn.model.space import Parameter, SearchSpace, config_id
from evoattn.samplers.genetic import GeneticSampler
from evoattn.samplers.pool import ConfigPool
from evoattn.samplers.registry import SAMPLERS, SamplerError, make_sampler
from evoattn.samplers.tpe import History, TpeSampler

PROBLEM = AttentionProblem(1, 1, 1, 64, 64, 64)
every_sampler = pytest.mark.parametrize("name", SAMPLERS)


def space(family: str, *values: tuple, starting: tuple[dict, ...] = ()) -> SearchSpace:
    """Parameters `TILE`, `<family>_1`, `<family>_2`, … : the families share only the first."""
    names = ["TILE", *(f"{family}_{i}" for i in range(1, len(values)))]
    return SearchSpace(
        family, tuple(Parameter(n, v, "") for n, v in zip(names, values)), tuple({"config": s} for s in starting)
    )


SPACES = {
    "round": space("round", *[tuple(range(8))] * 6, starting=({"TILE": 7, **{f"round_{i}": 7 for i in range(1, 6)}},)),
    "flat": space("flat", tuple(range(8)), ("x", "y", "z"), (False, True), *[tuple(range(6))] * 3, (4,)),
}


def place(family: str, params: dict) -> list[float]:
    """The config as a point of the unit cube."""
    return [
        p.values.index(params[p.name]) / (len(p.values) - 1) for p in SPACES[family].parameters if len(p.values) > 1
    ]


def why_invalid(family: str, params: dict) -> str | None:
    """About four in five points are invalid."""
    x = place(family, params)
    if x[0] + x[1] > 1.1:
        return f"TILE={params['TILE']} does not go with {family}_1."
    return "The block needs 123 bytes." if abs(x[2] + x[3] - x[4] - x[5]) > 0.35 else None


def cost(family: str, params: dict) -> float:
    """Smooth, with its minimum 20 inside the cube of `round`; `flat` is never below 24."""
    distance = sum((x - 0.3 - 0.1 * i) ** 2 for i, x in enumerate(place(family, params)[:5]))
    return (20 if family == "round" else 24) * math.exp(distance)


def trial(number: int, proposal: Proposal, state: TrialState = TrialState.COMPLETE) -> Trial:
    timings = (
        (Timing((cost(proposal.family, proposal.params),), {"stage": "screen"}),)
        if state is TrialState.COMPLETE
        else ()
    )
    identity = config_id(proposal.family, proposal.params)
    return Trial(
        number,
        1,
        proposal.family,
        proposal.params,
        identity,
        state,
        "",
        None,
        None,
        None,
        timings,
        None,
        proposal.parents,
        proposal.operator,
        "",
        0.0,
    )


def fate(number: int) -> TrialState:
    """Every fifth candidate fails."""
    return (
        TrialState.COMPLETE
        if number % 5
        else (TrialState.WRONG_RESULT, TrialState.DUPLICATE, TrialState.TIMEOUT)[number % 3]
    )


def search(
    name: str, seed: int, count: int, in_flight: int = 6, recorded: tuple[Trial, ...] = (), make=None
) -> list[Trial]:
    """A search with `in_flight` candidates on their way, whose results come in random order."""
    sampler = (make or SAMPLERS[name])(SPACES, PROBLEM, seed, why_invalid)
    order, flying = random.Random(seed), []
    sampler.restore(recorded)
    trials: list[Trial] = []
    while len(trials) < count:
        flying += sampler.ask(in_flight - len(flying))
        proposal = flying.pop(order.randrange(len(flying)))
        number = len(recorded) + len(trials) + 1
        trials.append(trial(number, proposal, fate(number)))
        sampler.tell(proposal, trials[-1])
    return trials


def best(trials: list[Trial]) -> float:
    return min(t.timing.median_us for t in trials if t.timing)


def typical(trials: list[Trial]) -> float:
    return statistics.median(t.timing.median_us for t in trials if t.timing)


def test_an_unknown_sampler_is_one_sentence():
    with pytest.raises(SamplerError, match=r"Unknown sampler 'anneal'; evoattn has genetic, tpe, random\."):
        make_sampler("anneal", SPACES, PROBLEM, 0, why_invalid)


@every_sampler
def test_starting_configs_come_first_an_invalid_one_mended(name):
    proposals = make_sampler(name, SPACES, PROBLEM, 0, why_invalid).ask(3)
    config = SPACES["round"].starting[0]["config"]
    assert why_invalid("round", config) and not why_invalid("round", proposals[0].params)
    assert [p.operator for p in proposals] == ["starting", "random", "random"]
    assert make_sampler(name, SPACES, PROBLEM, 0, lambda family, params: None).ask(1)[0].params == config


@every_sampler
def test_all_others_are_valid_and_none_comes_twice(name):
    trials = search(name, seed=1, count=400)
    assert len({t.config_id for t in trials}) == 400
    for t in trials:
        SPACES[t.family].make_config(t.config)
        assert why_invalid(t.family, t.config) is None
    assert {t.family for t in trials} == set(SPACES)


@every_sampler
def test_same_seed_and_results_give_the_same_search(name):
    once, again = search(name, 3, 120), search(name, 3, 120)
    assert [t.config_id for t in once] == [t.config_id for t in again]
    assert [t.config_id for t in once] != [t.config_id for t in search(name, 4, 120)]


@every_sampler
def test_resume_repeats_nothing_and_goes_on_from_the_best(name):
    first = tuple(search(name, 5, 300))
    then = search(name, 5, 60, recorded=first)
    assert not {t.config_id for t in first} & {t.config_id for t in then}
    assert "starting" not in {t.operator for t in then}
    if name != "random":
        forgetful = search(name, 5, 60)
        assert typical(then) < typical(forgetful)


@every_sampler
def test_recorded_trials_of_other_spaces_do_no_harm(name):
    old = trial(1, Proposal("round", {"TILE": 7, **{f"round_{i}": 7 for i in range(1, 6)}}, operator="starting"))
    gone = [
        old.__class__(**{**old.__dict__, "number": n, "family": family, "config": config, "config_id": str(n)})
        for n, family, config in ((2, "unknown", {"A": 1}), (3, "round", {"TILE": 99}))
    ]
    sampler = make_sampler(name, SPACES, PROBLEM, 0, why_invalid)
    sampler.restore([old, *gone])
    assert all(p.operator == "random" for p in sampler.ask(5))  # the starting config is recorded


@every_sampler
def test_a_small_space_is_used_up_to_the_last_config(name):
    spaces = {"tiny": space("tiny", (1, 2, 3, 4), (1, 2, 3), ("a", "b")), "one": space("one", (1,))}

    def invalid(family, params):
        return "No." if family == "tiny" and (params["TILE"] + params["tiny_1"]) % 3 else None

    sampler = make_sampler(name, spaces, PROBLEM, 0, invalid)
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
def test_asking_is_quick_when_there_is_much_history(name):
    sampler = make_sampler(name, SPACES, PROBLEM, 0, why_invalid)
    sampler.restore(search("random", 1, 1200))
    sampler.ask(1)
    started = time.process_time()
    assert len(sampler.ask(40)) == 40
    assert (time.process_time() - started) / 40 < 0.02  # 0.1 to 3 ms; the rest is for a busy machine


@pytest.mark.slow
@pytest.mark.parametrize("name", ["genetic", "tpe"])
def test_learning_beats_chance(name):
    learned = statistics.mean(best(search(name, seed, 300)) for seed in range(3))
    chance = statistics.mean(best(search("random", seed, 300)) for seed in range(3))
    assert math.log(learned / 20) < 0.5 * math.log(chance / 20)


class ForgetfulGenetic(GeneticSampler):
    start_over_after = 40


class ForgetfulTpe(TpeSampler):
    history = History(longest=60, best=20, latest=20)


@pytest.mark.parametrize("forgetful", [ForgetfulGenetic, ForgetfulTpe])
def test_a_history_cut_short_keeps_what_was_learned_and_what_is_under_way(forgetful):
    trials = search("", 1, 400, make=forgetful)
    assert len({t.config_id for t in trials}) == 400
    assert typical(trials[300:]) < 0.8 * typical(search("random", 1, 400)[300:])


def test_the_genetic_algorithm_records_lineage():
    trials = search("genetic", 2, 300)
    born = {t.number: t for t in trials}
    children = [t for t in trials if t.parents]
    assert {t.operator for t in children} == {"crossover", "mutation"} and len(children) > 100
    for child in children:
        parents = [born[number] for number in child.parents]
        assert all(p.state is TrialState.COMPLETE and p.number < child.number for p in parents)
        assert child.family == parents[0].family
        assert len(parents) == (2 if child.operator == "crossover" else 1)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), modulus=st.integers(1, 5), seed=st.integers(0, 99))
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
