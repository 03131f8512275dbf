"""What samplers propose of made-up families stays, until a change wants it otherwise. The model of the guided one is
here a formula of whole numbers, so that every machine chooses the same."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from evoattn.model.records import TrialState
from evoattn.samplers import guided, tpe
from evoattn.samplers.base import ConfigPool, SamplerSetup
from evoattn.samplers.guided import Thinker, first_of_each_value
from evoattn.samplers.tpe import TpeSampler
from tests.samplers.made_up_families import SPACES, cost, search, why_invalid
from tests.support.facts import changed

COUNT = 50


def _proposed(trials: Any) -> list[Any]:
    return [[t.family, list(t.config.values()), t.operator, t.parents] for t in trials]


def _formula(rows: Any, prior: Any, values: Any, seed: int) -> Any:
    """Two opinions: one likes high places, the other low ones; both like what the best had."""
    kept = rows[int(np.argmin([99.0 if value is None else value for value in values]))]

    def judge(others: Any, of_others: Any) -> Any:
        far = np.abs(others - kept).sum(1)
        return np.array([64 * far - others.sum(1), 64 * far + others.sum(1)]) + np.round(of_others)

    return judge


def _prior(configs: Any) -> list[float]:
    return [float(round(cost(family, params))) for family, params in configs]


def _guided(with_prior: bool) -> Any:
    def make(setup: SamplerSetup) -> guided.GuidedSampler:
        return guided.GuidedSampler(replace(setup, prior=_prior) if with_prior else setup)

    return make


def facts() -> Iterator[tuple[str, Any]]:
    """See `tests.support.facts`."""
    for name in ("random", "genetic"):
        first = search(name, 2, COUNT)
        yield name, _proposed(first)
        yield f"{name}, resumed", _proposed(search(name, 3, 20, recorded=tuple(first)))
    with mock.patch.object(guided, "regression", _formula):
        for with_prior in (False, True):
            first = search("guided", 2, COUNT, make=_guided(with_prior))
            yield f"guided, {with_prior}", _proposed(first)
            resumed = search("guided", 3, 30, 2, tuple(first), _guided(with_prior))
            yield f"guided, {with_prior}, resumed", _proposed(resumed)
    pool = ConfigPool(SPACES, why_invalid, random.Random(4))
    thinker = Thinker(pool, _prior)
    drawn = thinker.random(40)
    thoughts = list(thinker.near(drawn).values())
    plain = [[t.family, list(t.params.values()), t.row.tolist(), t.prior] for t in thoughts]
    yield "thoughts", [drawn, plain, thinker.bred(thoughts, 40), len(first_of_each_value(thoughts))]
    yield (
        "pool",
        [[pool.draw(family), pool.near(*drawn[i]), pool.mutate(*drawn[i])] for i in range(9) for family in SPACES],
    )


@pytest.mark.slow
def test_what_samplers_propose_stays():
    assert not changed("samplers")


def test_tpe_learns_of_what_was_recorded():
    recorded = search("random", 5, 12)
    sampler = TpeSampler(SamplerSetup(SPACES, 5, why_invalid))
    sampler.restore(recorded)
    known = {family: len(one._finished) for family, one in sampler._estimators.items()}
    right = [t for t in recorded if t.state is not TrialState.DUPLICATE]
    assert known == {family: sum(t.family == family for t in right) for family in SPACES}


def test_a_history_is_cut_once_it_is_longer_than_it_may_be():
    estimator = tpe._Estimator(SPACES["flat"], random.Random(0), tpe.History(longest=4, best=1, latest=2))
    assert estimator._fixed == {"flat_6": 4} and set(estimator._values) == {"TILE", *(f"flat_{n}" for n in range(1, 6))}
    sampler = vars(estimator._study.sampler)
    assert sampler["_multivariate"] and sampler["_constant_liar"], "genes go together, and what runs counts as bad"
    lengths = [estimator.add({}, value) or len(estimator._finished) for value in (3.0, 1.0, None, 2.0, 5.0)]
    assert lengths == [1, 2, 3, 4, 3] and [value for value, _ in estimator._finished] == [1.0, 2.0, 5.0]


def test_starting_configs_that_are_thought_alike_keep_their_order():
    tiles = [{**SPACES["round"].starting[0], "TILE": n % 8, "round_1": n // 8} for n in range(64)]
    spaces = {"round": replace(SPACES["round"], starting=tuple(tiles))}
    setup = SamplerSetup(spaces, 5, why_invalid, lambda configs: [float(n % 2) for n, _ in enumerate(configs)])
    sampler = guided.GuidedSampler(setup)
    assert [params for _, params in sampler._spare] == [*tiles[::2], *tiles[1::2]][guided.STARTING :]
