"""The pool of configs not yet drawn."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evoattn.samplers.pool import ConfigPool
from tests.samplers.made_up_families import space


@settings(max_examples=30)
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


def test_one_parameter_is_mutated_on_average():
    pool = ConfigPool({"f": space("f", *[tuple(range(50))] * 5)}, lambda family, params: None, random.Random(1))
    start = dict.fromkeys(pool.spaces["f"].names(), 25)
    changes = [sum(v != 25 for v in pool.mutate("f", start).values()) for _ in range(2000)]
    assert statistics.mean(changes) == pytest.approx(1.0, abs=0.06) and 0 in changes and max(changes) > 2
