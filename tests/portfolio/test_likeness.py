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
    assert (likeness(near, rows) @ found)[0] == pytest.approx(0.2, abs=0.06)
    assert (likeness(far, rows) @ found)[0] == pytest.approx(0.0, abs=1e-6)


def test_points_are_spread_and_none_is_taken_twice():
    rows = scaled([row(keys=float(k)) for k in (0, 0, 0, 1, 9, 10)])
    assert set(spread_points(rows, 3)) == {0, 5, 3} or set(spread_points(rows, 2)) == {0, 5}
    assert len(spread_points(rows, 48)) == 4
