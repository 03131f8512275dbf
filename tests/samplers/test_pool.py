"""The pool of configs not yet drawn."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_families import space

from evoattn.samplers.pool import ConfigPool


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
