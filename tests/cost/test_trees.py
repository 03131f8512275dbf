"""The trees' table gives what the trees say, and survives its file."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from evoattn.cost.fitted import STEP, Fitted, Trees, Weights, load, save

# x <= 1 ? 10 : (y <= 2 ? 20 : 30), with a missing y on the left; and a tree that is one leaf of 5.
NODES = np.array(
    [(1, 2, 0, 0, 1.0, False), (1, 1, 10, 0, 0, False), (3, 4, 0, 1, 2.0, True), (3, 3, 20, 0, 0, False),
     (4, 4, 30, 0, 0, False), (5, 5, 5, 0, 0, False)],
    [("left", int), ("right", int), ("value", float), ("feature", int), ("threshold", float), ("missing_left", bool)],
)  # fmt: skip
TREES = Trees.of_nodes(NODES, np.array([0, 5]), ("x", "y"), 2, 0.5)


def test_each_row_goes_down_every_tree():
    rows = np.array([[1.0, 9.0], [1.5, 2.0], [1.5, 2.5], [1.5, math.nan], [math.nan, 2.5]])
    assert TREES.predict(rows).tolist() == [15.5, 25.5, 35.5, 25.5, 35.5]


def test_the_sum_of_trees_is_that_of_what_they_say():
    more = replace(TREES, names=("y", "z"), value=TREES.value * 7, base=0.25)
    rows = np.array([[1.0, 9.0, 3.0], [1.5, 0.5, 2.5], [1.5, 2.5, math.nan]])
    assert TREES.and_then(more).predict(rows) == pytest.approx(TREES.predict(rows[:, :2]) + more.predict(rows[:, 1:]))


def test_the_file_keeps_all(tmp_path):
    weights = {"f": Weights({"tensor": 1.0}, 0.5, 0.25, 1.5, 2.0)}
    save(Fitted(weights, {"f": TREES}, {"times": 3}), tmp_path / "fitted.npz")
    again = load(tmp_path / "fitted.npz")
    assert again.weights == weights and again.about == {"times": 3}
    assert list(again.trees) == ["f"] and again.trees.get("another family") is None
    for name, value in asdict(TREES).items():
        assert np.array_equal(getattr(again.trees["f"], name), value), name


def test_a_file_rounds_leaves_by_half_a_step_and_keeps_thresholds():
    value = TREES.value / 300 * (-1) ** np.arange(len(TREES.value))
    trees = replace(TREES, value=value, threshold=np.where(TREES.threshold == 2, np.float32(2.1), TREES.threshold))
    again = Trees.of_columns(trees.columns(), trees.names, trees.depth, trees.base)
    assert again.value == pytest.approx(value, abs=STEP / 2) and np.array_equal(again.threshold, trees.threshold)
    before = trees.columns() | {"value": trees.value[trees.right == np.arange(6)].astype(np.float16)}
    assert Trees.of_columns(before, trees.names, trees.depth, trees.base).value == pytest.approx(value, rel=2**-11)


def test_two_sets_of_trees_are_one_whose_sum_is_theirs():
    both = TREES.and_then(replace(TREES, names=("z", "x"), base=0.25))
    again = Trees.of_columns(both.columns(), both.names, both.depth, both.base)
    rows = np.array([[1.0, 9.0, 1.5], [1.5, 2.5, math.nan]])
    assert both.names == ("x", "y", "z")
    first, second = TREES.predict(rows[:, :2]), replace(TREES, base=0.25).predict(rows[:, [2, 0]])
    assert both.predict(rows).tolist() == again.predict(rows).tolist() == (first + second).tolist()


def test_nodes_in_another_order_are_refused():
    with pytest.raises(ValueError, match="left side first"):
        Trees.of_nodes(np.roll(NODES, 1), TREES.roots, TREES.names, 2, 0.5)
