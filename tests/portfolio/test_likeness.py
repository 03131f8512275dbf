"""Errors that were measured are carried over to problems that are like the measured ones, and to no others."""

import numpy as np
import pytest

from evoattn.portfolio.likeness import LENGTHS, likeness, scaled, smooth, spread_points

NAMES = list(LENGTHS)


def row(**features):
    return {name: features.get(name.replace(" ", "_"), 0.0) for name in NAMES}


def test_features_count_by_their_lengths():
    near, far = scaled([row(), row(keys=LENGTHS["keys"])])
    assert np.linalg.norm(far - near) == pytest.approx(1.0)


def test_an_error_is_carried_to_its_neighbour_but_not_far_away():
    rows = scaled([row(keys=float(k)) for k in range(12)])
    errors = np.where(np.arange(12) < 6, 0.2, -0.2)
    found = smooth(rows, rows, errors)
    near, far = scaled([row(keys=2.5)]), scaled([row(keys=100.0)])
    assert (likeness(near, rows) @ found.weights)[0] == pytest.approx(0.2, abs=0.06)
    assert (likeness(far, rows) @ found.weights)[0] == pytest.approx(0.0, abs=1e-6)


def test_what_is_left_out_is_what_a_fit_without_it_says():
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(30, len(NAMES)))
    errors, points = 0.1 * rng.normal(size=30), rows[:10]
    found = smooth(points, rows, errors)
    for i in (0, 7, 29):
        rest = [j for j in range(30) if j != i]
        without = likeness(rows[[i]], points) @ smooth(points, rows[rest], errors[rest]).weights
        assert found.left_out[i] == pytest.approx(without[0], abs=2e-3)


def test_points_are_spread_and_none_is_taken_twice():
    rows = scaled([row(keys=float(k)) for k in (0, 0, 0, 1, 9, 10)])
    assert set(spread_points(rows, 3)) == {0, 5, 3} or set(spread_points(rows, 2)) == {0, 5}
    assert len(spread_points(rows, 48)) == 4
