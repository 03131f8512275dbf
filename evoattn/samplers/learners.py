"""Models of what was measured in a study, from scikit-learn: what they are fitted to, and how they judge configs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Judge = Callable[[Array, Array], Array]
"""(rows, prior) → values to minimise, a row for each of one or more opinions."""

TREES = 24
LEAST_IN_LEAF = 2
FEATURES_SHARE = 0.5
"""Of the features, tried at each split."""
FAR = 0.7
"""Log of a time over the best beyond which the trees need not tell configs apart: twice the best."""
BEST_SHARE, LEAST_BEST = 0.1, 4
"""What the classifier calls good: so many of the trials, and at least so many."""


class Learner(Protocol):
    """Fits a model to rows of features, the prior of each (natural log of time over best), and what was found: the log
    of a time, or None for a failure."""

    def __call__(self, rows: Array, prior: Array, values: Sequence[float | None], seed: int) -> Judge: ...


def regression(rows: Array, prior: Array, values: Sequence[float | None], seed: int) -> Judge:
    """Extremely randomised trees (Geurts et al. 2006) learn by how much the prior errs; each tree is an opinion.

    A failure counts as a time of twice the best.
    """
    from sklearn.ensemble import ExtraTreesRegressor

    cap = min(v for v in values if v is not None) + FAR
    targets = np.array([cap if v is None else min(v, cap) for v in values]) - np.minimum(prior, FAR)
    model = ExtraTreesRegressor(TREES, min_samples_leaf=LEAST_IN_LEAF, max_features=FEATURES_SHARE, random_state=seed)
    model.fit(_with(rows, prior), targets)

    def judge(rows: Array, prior: Array) -> Array:
        features = _with(rows, prior)
        return np.array([tree.tree_.predict(features).ravel() for tree in model.estimators_]) + prior

    return judge


def classification(rows: Array, prior: Array, values: Sequence[float | None], seed: int) -> Judge:
    """A random forest (Breiman 2001) learns which configs are among the best tenth; one opinion, its probability."""
    from sklearn.ensemble import RandomForestClassifier

    costs = np.array([np.inf if v is None else v for v in values])
    good = costs <= np.sort(costs)[min(len(costs) - 1, max(LEAST_BEST, int(BEST_SHARE * len(costs))) - 1)]
    model = RandomForestClassifier(2 * TREES, min_samples_leaf=LEAST_IN_LEAF, random_state=seed)
    model.fit(_with(rows, prior), good)
    if len(model.classes_) < 2:  # all are alike
        return lambda rows, prior: prior[None]

    def judge(rows: Array, prior: Array) -> Array:
        unlikely = 1 - model.predict_proba(_with(rows, prior))[:, 1]
        return np.asarray(unlikely + 1e-3 * prior)[None]  # the prior decides between equals

    return judge


def _with(rows: Array, prior: Array) -> NDArray[np.float32]:
    """The prior is a feature too. Trees of scikit-learn compute in float32."""
    return np.column_stack([rows, prior]).astype(np.float32)
