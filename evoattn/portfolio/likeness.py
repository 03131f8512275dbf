"""What a kernel's fitted constants got wrong at measured problems, carried over to problems that are like them.

A Gaussian process on the logarithm of measured over predicted time, over the features of a problem, with few of the
measured problems as its inducing points (Quiñonero-Candela and Rasmussen 2005, "A unifying view of sparse approximate
Gaussian process regression", section 5: the subset of regressors).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # the first call of the op comes here, and would wait for it
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

LENGTHS = {
    "queries": 4.0,
    "keys": 3.0,
    "rows per SM": 3.0,
    "tiles per SM": 2.0,
    "last wave": 1.0,
    "K/V heads per SM": 4.0,
    "group": 4.0,
}
"""How far each of `features.features` may differ while errors are still alike. With a fifth of the problems left out of
everything, twice and half of these lost more on some of head_dim 64, 96, 128 and 160, and on none clearly less."""
ERROR, NOISE = 0.1, 0.1
"""Standard deviations of the logarithm of a time: of what is alike among neighbours, and of what is not."""
MOST_POINTS = 48
"""Of a class: 24 lost more, all of 100 no less."""


def scaled(rows: Sequence[dict[str, float]]) -> Array:
    """[problems, features]: each feature over its length."""
    return np.array([[row[name] / length for name, length in LENGTHS.items()] for row in rows])


def likeness(a: Array, b: Array) -> Array:
    """[a, b]: the covariance of the errors at each pair of scaled rows."""
    squares = ((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=-1)
    return np.asarray(ERROR**2 * np.exp(-0.5 * squares))


def spread_points(rows: Array, most: int = MOST_POINTS) -> list[int]:
    """Indexes of at most `most` of the scaled rows, each as far as can be from those before."""
    chosen = [0]
    nearest = ((rows - rows[0]) ** 2).sum(axis=1)
    while len(chosen) < min(most, len(rows)) and nearest.max() > 0:
        chosen.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, ((rows - rows[chosen[-1]]) ** 2).sum(axis=1))
    return chosen


def smooth(points: Array, rows: Array, errors: Array) -> Array:
    """[points]: weights by which `likeness(new rows, points) @ weights` are the errors at new rows. `errors` [rows]:
    logarithms of measured over predicted time at scaled rows."""
    across = likeness(points, rows)
    inner = across @ across.T + NOISE**2 * (likeness(points, points) + 1e-9 * np.eye(len(points)))
    return np.asarray(np.linalg.solve(inner, across @ errors))
