"""The trees' table gives what the trees say, and survives its file."""

import math
from dataclasses import asdict

import numpy as np

from evoattn.cost.fitted import Fitted, Trees, Weights, load, save

# x <= 1 ? 10 : (y <= 2 ? 20 : 30), with a missing y on the left; and a tree that is one leaf of 5.
TREES = Trees(
    ("x", "y"), np.array([0, 5]), np.array([0, 0, 1, 0, 0, 0]), np.array([1.0, 0, 2, 0, 0, 0]),
    np.array([False, False, True, False, False, False]), np.array([1, 1, 3, 3, 4, 5]), np.array([2, 1, 4, 3, 4, 5]),
    np.array([0.0, 10, 0, 20, 30, 5]), 2, 0.5,
)  # fmt: skip


def test_each_row_goes_down_every_tree():
    rows = np.array([[1.0, 9.0], [1.5, 2.0], [1.5, 2.5], [1.5, math.nan], [math.nan, 2.5]])
    assert TREES.predict(rows).tolist() == [15.5, 25.5, 35.5, 25.5, 35.5]


def test_the_file_keeps_all(tmp_path):
    weights = {"f": Weights({"tensor": 1.0}, 0.5, 0.25, 1.5, 2.0)}
    save(Fitted(weights, {"f": TREES}, {"times": 3}), tmp_path / "fitted.npz")
    again = load(tmp_path / "fitted.npz")
    assert again.weights == weights and again.about == {"times": 3}
    for name, value in asdict(TREES).items():
        assert np.array_equal(getattr(again.trees["f"], name), value), name
