"""The fit: weights of the physical terms by least squares, and trees for each family for what the terms leave over."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from evoattn.cost.cost import MOST_CORRECTION
from evoattn.cost.fitted import Fitted, Trees, Weights
from evoattn.cost.training.rows import Row
from evoattn.cost.training.table import BUSY, Floats, Numbers, Table, columns, put_together
from evoattn.families import registry

SAMPLE = 12_000
"""Rows from which the physical weights are fitted."""
UNIT_BOUNDS = {"tensor": (1, 3), "fp32": (0.8, 3), "special": (1, 3), "issue": (1, 3), "shared": (0.9, 3),
               "l2": (0.5, 3), "dram": (1, 2)}  # fmt: skip
"""No unit is faster than its peak; L2 and instruction counts are known less well."""
FAMILY_BOUNDS = {"chain": (0.05, 3), "fetch": (0.02, 3), "ends": (0.05, 4), "launch_us": (0.5, 6)}
AT_ONCE = 4000
"""Rows that go through the trees at once."""
LEAST_ROWS = 200
"""Rows of a family below which it gets no trees."""
TREES: dict[str, float] = {"max_iter": 220, "learning_rate": 0.1, "max_leaf_nodes": 24, "min_samples_leaf": 15,
                           "l2_regularization": 1.0, "max_bins": 96}  # fmt: skip
"""Arguments of scikit-learn's boosting."""
FEW_TREES, FEW_ROWS = TREES | {"max_iter": 80}, 3500
"""Of families of fewer rows."""
MANY_TREES = TREES | {"max_iter": 600, "learning_rate": 0.08, "max_leaf_nodes": 40, "min_samples_leaf": 20,
                      "max_bins": 192}  # fmt: skip
MANY_ROWS = 20_000
"""Rows of a family from which it gets `MANY_TREES`. With them flash_wgmma's correlation within problems left out rose
from 0.900 to about 0.92 in the median; smaller families have too few rows for more."""
MOST_TREES = MANY_TREES | {"max_features": 0.5}
MOST_ROWS = 100_000
"""Rows of a family from which each split sees half of the features, drawn at random. With that, and the `CLOSE`
weights, flash_wgmma's first choice lost 1.024 in place of 1.027 on 256 problems of campaigns p, r and t, left out of
the fit, and 1.029 in place of 1.032 on 190 of a, b and c. split_kv (70,000 rows) gained nothing, and lost on
landscapes."""
WIDE, CLOSE = (0.3, 0.15), (0.1, 0.1)
"""Weights of rows: of those far behind the best of their problem, and the part of its time behind it at which what is
above that has fallen to 1/e. `CLOSE` is for families of `MOST_ROWS` rows."""

NEAR_TREES: dict[str, float] = {"max_iter": 70, "learning_rate": 0.06, "max_leaf_nodes": 24, "min_samples_leaf": 20,
                                "l2_regularization": 10.0, "max_bins": 64, "max_features": 0.3}  # fmt: skip
"""Arguments of scikit-learn's boosting for trees behind those of a fit."""
NEAR = 2.0
"""Times over the best of their problem up to which such trees are fitted to them, with the `WIDE` weights. Of 286
problems left out first choices lose 1.036 without such trees, 1.033 with them and with twice as many, 1.034 with rows
up to 1.3 alone; the 95 % are 1.133, 1.114, 1.114 and 1.132."""


def fit(table: Table, chosen: Numbers, known: dict[str, Weights] | None = None) -> Fitted:
    """The whole model from these rows of the table; with weights that are `known` the trees alone."""
    weights = known or fit_weights(table, chosen)
    trees: dict[str, Trees] = {}
    factors = behind([table.rows[i] for i in chosen])[table.fits[chosen]]
    chosen = chosen[table.fits[chosen]]
    us, parts = table.physical(chosen, weights)
    for family in sorted(set(table.family[chosen])):
        mine = np.flatnonzero(table.family[chosen] == family)
        if len(mine) >= LEAST_ROWS:
            names, asked = table.asked(family, chosen[mine], us[mine], parts[mine])
            over = np.log(table.us[chosen[mine]] / us[mine])
            trees[str(family)] = fit_trees(names, asked, over, near_best(factors[mine]), tree_size(len(mine)))
    return Fitted(weights, trees, {})


def fit_near(table: Table, chosen: Numbers, base: Fitted) -> Fitted:
    """`base` with more trees of each family behind its own: for what it leaves over within each problem of these rows,
    which it must not have seen, of kernels near the problem's best."""
    factors = behind([table.rows[i] for i in chosen])
    near = table.fits[chosen] & (factors <= NEAR)
    chosen, factors = chosen[near], factors[near]
    weights = WIDE[0] + np.exp(-(factors - 1) / WIDE[1])
    over = np.log(table.us[chosen] / predict(table, chosen, base))
    number: dict[object, int] = {}
    keys = ((table.rows[i].gpu.name, table.rows[i].problem) for i in chosen)
    problem = np.array([number.setdefault(key, len(number)) for key in keys])
    over -= (np.bincount(problem, over * weights) / np.bincount(problem, weights))[problem]
    us, parts = table.physical(chosen, base.weights)
    trees = dict(base.trees)
    for family in sorted(set(table.family[chosen]) & trees.keys()):
        mine = np.flatnonzero(table.family[chosen] == family)
        if len(mine) >= LEAST_ROWS:
            names, asked = table.asked(family, chosen[mine], us[mine], parts[mine])
            trees[family] = trees[family].and_then(fit_trees(names, asked, over[mine], weights[mine], NEAR_TREES))
    return Fitted(base.weights, trees, base.about)


def predict(table: Table, chosen: Numbers, fitted: Fitted) -> Floats:
    """Scores of these rows, as `evoattn.cost.cost.cost` gives them."""
    us, parts = table.physical(chosen, fitted.weights)
    factors = np.ones(len(chosen))
    for family, trees in fitted.trees.items():
        mine = np.flatnonzero((table.family[chosen] == family) & table.fits[chosen])
        if len(mine):
            names, asked = table.asked(family, chosen[mine], us[mine], parts[mine])
            asked = columns(asked, names, trees.names)
            logs = [trees.predict(asked[i : i + AT_ONCE]) for i in range(0, len(mine), AT_ONCE)]
            factors[mine] = np.exp(np.clip(np.concatenate(logs), -MOST_CORRECTION, MOST_CORRECTION))
    return table.bounded(chosen, us * factors)


def fit_weights(table: Table, chosen: Numbers) -> dict[str, Weights]:
    """Factors of the physical terms, by bounded least squares of logarithms: units for all families together, waits
    and launches for each."""
    from scipy.optimize import least_squares

    chosen = chosen[np.random.default_rng(0).permutation(len(chosen))[:SAMPLE]]
    chosen = chosen[table.fits[chosen]]
    families = sorted(set(table.family[chosen]))
    terms, shares, measured = table.terms[chosen], table.shares[chosen], np.log(table.us[chosen])
    family = np.array([families.index(name) for name in table.family[chosen]])
    units = len(BUSY)

    def residuals(logs: Floats) -> Floats:
        unit, each = np.exp(logs[:units]), np.exp(logs[units:]).reshape(len(families), 4)[family]
        us, _ = put_together(terms, shares, np.broadcast_to(unit, (len(family), units)), each)
        result: Floats = np.log(us) - measured
        return result

    bounds = np.log([*UNIT_BOUNDS.values(), *list(FAMILY_BOUNDS.values()) * len(families)])
    solved = least_squares(residuals, bounds.mean(1), bounds=(bounds[:, 0], bounds[:, 1]), loss="soft_l1", f_scale=0.15)
    factors = np.exp(solved.x)
    common = dict(zip(BUSY, map(float, factors[:units]), strict=True))
    each = factors[units:].reshape(len(families), 4)
    found = {str(name): Weights(common, *map(float, each[i])) for i, name in enumerate(families)}
    usual = Weights(common, *map(float, np.exp(np.log(each).mean(0))))  # of a family without a measured kernel
    return {name: found.get(name, usual) for name in registry.FAMILIES}


def behind(rows: Sequence[Row]) -> Floats:
    """The rows' times over the best of their problem on their card."""
    best: dict[object, float] = {}
    for row in rows:
        key = row.gpu.name, row.problem
        best[key] = min(best.get(key, math.inf), row.us)
    return np.array([row.us / best[row.gpu.name, row.problem] for row in rows])


def near_best(factors: Floats) -> Floats:
    """Weights of a family's rows, of `behind`: those near the best of their problem weigh more."""
    least, fall = CLOSE if len(factors) >= MOST_ROWS else WIDE
    weights: Floats = least + np.exp(-(factors - 1) / fall)
    return weights


def tree_size(rows: int) -> dict[str, float]:
    """The arguments of scikit-learn's boosting for a family of so many rows."""
    if rows >= MANY_ROWS:
        return MOST_TREES if rows >= MOST_ROWS else MANY_TREES
    return TREES if rows >= FEW_ROWS else FEW_TREES


def fit_trees(
    names: tuple[str, ...], table: Floats, over: Floats, near: Floats, size: Mapping[str, float] = TREES
) -> Trees:
    """Trees of one family for `over`, log(measured / physical), from [row, feature]; rows near the best of their
    problem weigh more. `size`: arguments of scikit-learn's boosting."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    varies = [i for i in range(len(names)) if len(np.unique(table[:, i])) > 1]
    names, table = tuple(names[i] for i in varies), table[:, varies]
    model = HistGradientBoostingRegressor(**size, early_stopping=False, random_state=0)
    model.fit(table, over, sample_weight=near)
    return _as_trees(model, names)


def _rounded_up(thresholds: Floats) -> Floats:
    """As numbers that float32 has. Thresholds are often values of the data: rounded down they would part these."""
    single = thresholds.astype(np.float32)
    up: Floats = np.where(single < thresholds, np.nextafter(single, np.float32(np.inf)), single).astype(np.float64)
    return up


NODE = [("left", "i8"), ("right", "i8"), ("value", "f8"), ("feature", "i8"), ("threshold", "f8"), ("missing_left", "?")]


def _as_trees(model: Any, names: tuple[str, ...]) -> Trees:
    """The nodes of scikit-learn's trees in one table."""
    tables = [tree.nodes for (tree,) in model._predictors]  # no public way to them; scikit-learn is pinned
    roots = np.cumsum([0, *map(len, tables)])[:-1]
    nodes, first = np.concatenate(tables), np.repeat(roots, [len(table) for table in tables])
    leaf, own = nodes["is_leaf"] == 1, np.arange(len(nodes))
    found = np.empty(len(nodes), NODE)
    for side in ("left", "right"):
        found[side] = np.where(leaf, own, nodes[side].astype(np.int64) + first)
    found["value"], found["feature"] = nodes["value"], nodes["feature_idx"]
    found["threshold"], found["missing_left"] = _rounded_up(nodes["num_threshold"]), nodes["missing_go_to_left"] == 1
    base = float(model._baseline_prediction.ravel()[0])
    return Trees.of_nodes(found, roots, names, int(nodes["depth"].max()), base)
