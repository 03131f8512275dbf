"""The model of what was measured in a study, from scikit-learn: what it is fitted to, and how it judges configs."""

from collections.abc import Callable, Sequence

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


def regression(rows: Array, prior: Array, values: Sequence[float | None], seed: int) -> Judge:
    """Extremely randomised trees (Geurts et al. 2006) learn by how much the prior errs; each tree is an opinion.

    Fitted to rows of features, the prior of each (natural log of time over best), and what was found: the log of a
    time, or None for a failure, which counts as a time of twice the best."""
    from sklearn.ensemble import ExtraTreesRegressor

    cap = min(v for v in values if v is not None) + FAR
    targets = np.array([cap if v is None else min(v, cap) for v in values]) - np.minimum(prior, FAR)
    model = ExtraTreesRegressor(TREES, min_samples_leaf=LEAST_IN_LEAF, max_features=FEATURES_SHARE, random_state=seed)
    model.fit(_with(rows, prior), targets)

    def judge(rows: Array, prior: Array) -> Array:
        features = _with(rows, prior)
        return np.array([tree.tree_.predict(features).ravel() for tree in model.estimators_]) + prior

    return judge


def _with(rows: Array, prior: Array) -> NDArray[np.float32]:
    """The prior is a feature too. Trees of scikit-learn compute in float32."""
    return np.column_stack([rows, prior]).astype(np.float32)
