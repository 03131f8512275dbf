"""Faults of the guided sampler that once passed the tests: what it learns of, whose opinion it asks, what it keeps."""

import numpy as np

from evoattn.model.records import Proposal
from evoattn.samplers.base import SamplerSetup
from evoattn.samplers.guided import MOST_TRIALS, GuidedSampler
from evoattn.samplers.pool import ConfigPool
from tests.samplers.made_up_families import SPACES, trial, why_invalid


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


def test_a_model_is_of_the_best_and_of_the_latest():
    guided, count = sampler(), MOST_TRIALS + MOST_TRIALS // 2
    pool = ConfigPool(SPACES, why_invalid, guided.rng)
    while len(guided._values) < count:
        drawn = pool.draw("round")
        proposal = Proposal(*drawn, operator="random")
        guided.tell(proposal, trial(len(guided._values), proposal))
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
