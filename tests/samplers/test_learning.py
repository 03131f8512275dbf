"""What samplers learn: better than chance, with a history cut short too; the lineage of what they breed."""

import math
import random
import statistics
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from evoattn.cost.cost import scores
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model import shape_text as problems
from evoattn.model.gpu import GPUS
from evoattn.model.records import Proposal, Timing, Trial, TrialState
from evoattn.model.space import KernelConfig, config_id
from evoattn.samplers.base import STARTING, ConfigPool, SamplerSetup, objective
from evoattn.samplers.for_problem import WORST, cost_prior, sampler_of
from evoattn.samplers.genetic import GeneticSampler
from evoattn.samplers.guided import (
    FAMILY_NEAR,
    LEAST_EACH,
    MOST_EACH,
    MOST_TRIALS,
    THOUGHTS,
    TOGETHER,
    GuidedSampler,
    Thought,
    first_of_each_value,
    regression,
)
from evoattn.samplers.tpe import History, TpeSampler
from tests.samplers.made_up_families import SPACES, best, cost, search, trial, typical, why_invalid


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_was_proposed_is_not_priced_again_when_its_result_comes_late():
    priced = []

    def prior(configs):
        priced.extend(config_id(family, params) for family, params in configs)
        return [math.log(cost(family, params) / 20) for family, params in configs]

    sampler = GuidedSampler(SamplerSetup(SPACES, 0, why_invalid, prior))
    flying, told = [], 0
    for number in range(6):
        flying.append(sampler.ask(TOGETHER))
        for proposal in flying.pop(0) if number > 2 else ():
            so_far, told = len(priced), told + (proposal.operator == "guided")
            sampler.tell(proposal, trial(told, proposal))
            assert len(priced) == so_far or proposal.operator != "guided"
    assert told > TOGETHER


@pytest.mark.slow
@pytest.mark.parametrize(("count", "most"), [(1, MOST_EACH), (8, THOUGHTS), (40, THOUGHTS), (200, 200 * LEAST_EACH)])
def test_many_proposals_at_once_share_the_thoughts(count, most):
    priced = []

    def prior(configs):
        priced.extend(configs)
        return [math.log(cost(family, params) / 20) for family, params in configs]

    sampler = GuidedSampler(SamplerSetup(SPACES, 0, why_invalid, prior))
    sampler.ask(TOGETHER)
    priced.clear()
    assert [len(sampler.ask(count)) for _ in range(5)] == 5 * [count]
    assert most / 2 < len(priced) <= 5 * most + TOGETHER  # what was thought of before is not priced again


@pytest.mark.slow
@pytest.mark.parametrize(("behind", "tried"), [(FAMILY_NEAR - 0.1, 2), (FAMILY_NEAR + 0.5, 0)])
def test_each_family_is_tried_first_unless_it_is_far_behind(behind, tried):
    """By the prior, `round` is so far behind `flat` that no opinion prefers it."""

    def prior(configs):
        return [math.log(cost(family, params) / 20) + shift[family] for family, params in configs]

    shift = {"flat": 0.0, "round": math.log(24 / 20) + behind}
    spaces = {family: replace(space, starting=()) for family, space in SPACES.items()}
    for seed in range(5):
        sampler = GuidedSampler(SamplerSetup(spaces, seed, why_invalid, prior))
        first = [p for p in sampler.ask(8) if p.operator == "guided"][:4]
        of_round = [cost(p.family, p.params) for p in first if p.family == "round"]
        assert len(of_round) == tried
        assert all(found < 1.02 * 20 for found in of_round)  # random configs are some 1.5 times as slow


def test_parents_are_of_every_value():
    thoughts = [Thought("a", {"x": x, "y": y}, np.zeros(0), 0.0) for x, y in [(1, 1), (1, 2), (1, 1), (2, 2), (2, 3)]]
    assert first_of_each_value(thoughts) == [thoughts[0], thoughts[1], thoughts[3], thoughts[4]]


def sampler():
    return GuidedSampler(SamplerSetup(SPACES, 0, why_invalid, None))


class Noted(dict):
    """Knows what was read of it."""

    def __init__(self, items):
        super().__init__(items)
        self.read = []

    def __getitem__(self, key):
        self.read.append(key)
        return super().__getitem__(key)


@pytest.mark.slow
def test_a_model_is_of_the_best_and_of_the_latest():
    guided, count = sampler(), MOST_TRIALS + MOST_TRIALS // 2
    pool = ConfigPool(SPACES, why_invalid, guided.rng)
    while len(guided._values) < count:
        drawn = pool.draw("round")
        proposal = Proposal(*drawn, operator="random")
        guided.tell(proposal, trial(len(guided._values), proposal))
    assert guided._news == count
    children = guided._thinker.bred(list(guided._thoughts.values())[:3], 4)
    assert len(children) == 4 and {family for family, _ in children} == {"round"}
    guided._thoughts = Noted(guided._thoughts)
    guided._fit()
    half, known = MOST_TRIALS // 2, list(guided._values)
    best = sorted(known, key=guided._values.__getitem__)[:half]
    assert set(guided._thoughts.read) == {*best, *known[-half:]}


def test_each_opinion_chooses_at_times():
    guided = sampler()
    guided._opinions = {
        "liked by one": np.array([0.0, 9.0]),
        "by the other": np.array([9.0, 0.0]),
        "by both a little": np.ones(2),
    }
    assert {guided._choose() for _ in range(40)} == {"liked by one", "by the other"}


def test_what_some_opinion_likes_best_is_kept():
    guided = sampler()
    guided._opinions = {
        name: np.array([worst, 5.0]) for name, worst in (("c", 3.0), ("a", 1.0), ("d", 4.0), ("b", 2.0))
    }
    guided._open = {name: name for name in guided._opinions}
    assert guided._liked(2) == ["a", "b"] and guided._liked(9) == ["a", "b", "c", "d"]


@pytest.mark.slow
def test_trees_learn_by_how_much_the_prior_errs_and_a_failure_is_a_slow_kernel():
    rng = np.random.default_rng(1)
    rows, prior = rng.integers(0, 4, (200, 3)).astype(float), rng.uniform(0, 0.5, 200)
    values = [float(p + 0.3 * (row[0] >= 2)) for row, p in zip(rows, prior, strict=True)]
    judged = regression(rows, prior, values, seed=0)(rows, prior).mean(0)
    assert np.abs(judged - values).mean() < 0.03
    values[:2] = [None, None]
    judged = regression(rows, np.zeros(200), values, seed=0)(rows, np.zeros(200)).mean(0)
    assert judged[:2].mean() > np.median(judged)


@pytest.mark.parametrize(
    "state, timed, cost, expected",
    [
        (TrialState.COMPLETE, 2.0, None, math.log(2)),
        (TrialState.PRUNED, 2.0, None, math.log(2)),
        (TrialState.COMPLETE, None, 5.0, None),
        (TrialState.ESTIMATED, None, 5.0, math.log(5)),
        (TrialState.ESTIMATED, None, 0.0, None),
        (TrialState.ESTIMATED, None, math.nan, None),
        (TrialState.ESTIMATED, None, None, None),
        (TrialState.WRONG_RESULT, 2.0, 5.0, None),
    ],
)
def test_what_samplers_minimise(state, timed, cost, expected):
    timings = (Timing((timed,), {}),) if timed else ()
    trial = Trial(1, 1, "f", {}, "id", state, "", None, None, None, timings, cost, (), "", "", 0.0)
    assert objective(trial) == expected


H100, PROBLEM = GPUS["h100"], problems.lookup("seed_h100")


def why_not(family, params):
    return registry.lookup(family).why_invalid(PROBLEM, KernelConfig(family, params), H100)


def drawn(family: str, count: int):
    pool = ConfigPool({family: load_space(family, H100)}, why_not, random.Random(0))
    return [(family, pool.draw(family)[1]) for _ in range(count)]


def test_a_prior_is_the_log_of_the_score_over_the_least_of_the_first_asked():
    prior, configs = cost_prior(PROBLEM, H100), drawn("flash_mma", 12)
    asked = scores(PROBLEM, [KernelConfig(*c) for c in configs], H100)
    first, rest = prior(configs[:6]), prior(configs[6:])
    assert min(first) == 0.0 and max(first + rest) <= WORST
    by_prior = sorted(range(12), key=lambda i: (first + rest)[i])
    assert asked[by_prior[0]] == min(asked) and prior([]) == []


@pytest.mark.parametrize("gpu", ["h100", "l4", "a100"])
def test_known_good_configs_are_expected_to_be_faster_than_random_ones(gpu):
    prior = cost_prior(PROBLEM, GPUS[gpu])
    known = [("flash_mma", c.params) for c in load_space("flash_mma", GPUS[gpu]).starting_configs()]
    known = [c for c in known if not registry.lookup("flash_mma").why_invalid(PROBLEM, KernelConfig(*c), GPUS[gpu])]
    assert median(prior(known)) < median(prior(drawn("flash_scalar", 20))) - 0.5


def test_a_sampler_of_a_problem_knows_which_configs_cannot_be():
    spaces = {name: load_space(name, H100) for name in ("flash_scalar", "flash_mma")}
    sampler = sampler_of("random", spaces, PROBLEM, H100, 3)
    for proposal in sampler.ask(30):
        assert not why_not(proposal.family, proposal.params)
    assert sampler.pool.rejected


@pytest.mark.slow
def test_with_a_prior_the_first_proposals_are_those_that_it_likes():
    spaces = {name: load_space(name, H100) for name in ("flash_mma", "flash_scalar")}
    prior = cost_prior(PROBLEM, H100)
    asked = GuidedSampler(SamplerSetup(spaces, 0, why_not, prior)).ask(40)
    random_ones = drawn("flash_mma", 20) + drawn("flash_scalar", 20)
    later = [(p.family, p.params) for p in asked if p.operator == "guided"]
    assert len(later) > 20 and median(prior(later)) < median(prior(random_ones)) - 0.5
    begun = [p for p in asked if p.operator == STARTING]
    assert 0 < len(begun) <= 10 < sum(len(s.starting) for s in spaces.values())
