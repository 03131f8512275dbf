"""Kernels are chosen that together lose least."""

import numpy as np

from evoattn.portfolio.cover import UNSERVED, choose, judge


def test_the_chosen_kernels_cover_what_one_cannot():
    us = np.array([[1.0, 3.0, 1.5], [3.0, 1.0, 1.5], [1.0, 3.0, 1.5]])
    columns = choose(us, us, [[0], [1], [2]])
    assert set(columns) == {0, 1} and judge(us, us, columns).worst == 1.0
    assert len(choose(us, us, [[0], [1], [2]], most=1)) == 1
    assert judge(np.array([[np.nan, 2.0]]), np.array([[1.0, 2.0]]), [0]).regrets[0] == UNSERVED


def test_a_kernel_is_chosen_by_how_the_rule_takes_it():
    us = np.array([[1.0, 1.2], [1.2, 1.0]])
    predicted = np.array([[1.0, 1.2], [1.0, 1.2]])  # the first always looks faster
    assert choose(us, predicted, [[0], [1]]) in ([0], [1]), "beside the first the second is never taken"


def test_variants_of_one_source_come_together():
    us = np.array([[1.0, 2.0, 2.0], [2.0, 1.0, 2.0], [2.0, 2.0, 1.0]])
    units = choose(us, us, [[0, 1], [2]], most=1)
    assert units == [0] and judge(us, us, [0, 1]).worst == 2.0
    assert set(choose(us, us, [[0, 1], [2]])) == {0, 1}


def test_problems_count_by_their_weights():
    us = np.array([[1.0, 2.0], [2.0, 1.0], [2.0, 1.0]])
    assert choose(us, us, [[0], [1]], most=1) == [1]
    assert choose(us, us, [[0], [1]], most=1, weights=np.array([5.0, 1.0, 1.0])) == [0]
