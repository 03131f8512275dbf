"""The prior of the samplers is the cost model: it knows good from bad before anything is measured."""

import random
from statistics import median

import pytest

from evoattn.cost.cost import scores
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model import shape_text as problems
from evoattn.model.gpu import GPUS
from evoattn.model.space import KernelConfig
from evoattn.samplers.base import STARTING, SamplerSetup
from evoattn.samplers.for_problem import WORST, cost_prior, sampler_of
from evoattn.samplers.guided import GuidedSampler
from evoattn.samplers.pool import ConfigPool

H100, PROBLEM = GPUS["h100"], problems.lookup("seed_h100")


def why_invalid(family, params):
    return registry.lookup(family).why_invalid(PROBLEM, KernelConfig(family, params), H100)


def drawn(family: str, count: int):
    pool = ConfigPool({family: load_space(family, H100)}, why_invalid, random.Random(0))
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
        assert not why_invalid(proposal.family, proposal.params)
    assert sampler.pool.rejected


@pytest.mark.slow
def test_with_a_prior_the_first_proposals_are_those_that_it_likes():
    spaces = {name: load_space(name, H100) for name in ("flash_mma", "flash_scalar")}
    prior = cost_prior(PROBLEM, H100)
    asked = GuidedSampler(SamplerSetup(spaces, 0, why_invalid, prior)).ask(40)
    random_ones = drawn("flash_mma", 20) + drawn("flash_scalar", 20)
    later = [(p.family, p.params) for p in asked if p.operator == "guided"]
    assert len(later) > 20 and median(prior(later)) < median(prior(random_ones)) - 0.5
    begun = [p for p in asked if p.operator == STARTING]
    assert 0 < len(begun) <= 10 < sum(len(s.starting) for s in spaces.values())
