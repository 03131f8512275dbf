"""Whom the genetic algorithm breeds from, and how."""

from __future__ import annotations

import statistics

import pytest

from evoattn.model.records import Proposal, TrialState
from evoattn.samplers.base import SamplerSetup
from evoattn.samplers.genetic import POPULATION, GeneticSampler
from tests.samplers.made_up_families import SPACES, search, trial, why_invalid


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


def test_the_better_parents_have_more_children():
    sampler = GeneticSampler(SamplerSetup(SPACES, 0, lambda family, params: None))
    trials = generation_of_right_trials()
    sampler.restore(trials)
    order = [t.number for t in sorted(trials, key=lambda t: t.timing.median_us)]
    places = [order.index(parent) for p in sampler.ask(400) for parent in p.parents]
    assert statistics.mean(places) == pytest.approx(POPULATION / 3, abs=1.0)  # the mean of the lesser of two
