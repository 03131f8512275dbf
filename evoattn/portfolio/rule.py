"""The rule that chooses among a class's kernels: of the measured problems nearest to the one at hand, who was fast there."""

from __future__ import annotations

import math
from collections.abc import Sequence

NEIGHBOURS = 4
"""Measured problems that are asked."""
UNKNOWN = math.log(2.0)
"""What a kernel that was not timed on a neighbour counts as having lost there: the neighbour refused it, so it is not made for it."""
SCALES = {
    "queries": 0.5,
    "keys": 0.7,
    "rows per SM": 0.6,
    "tiles per SM": 1.0,
    "last wave": 1.0,
    "K/V heads per SM": 0.5,
    "group": 0.5,
}
"""Weight of each feature's difference: chosen by `scripts/portfolio_build.py --tune`, all problems left out in turn."""


def distance(a: dict[str, float], b: dict[str, float]) -> float:
    """Euclidean distance of two problems' features, each weighted by SCALES."""
    return math.sqrt(sum((scale * (a[name] - b[name])) ** 2 for name, scale in SCALES.items()))


def losses(
    at: dict[str, float],
    measured: Sequence[dict[str, float]],
    slowdowns: Sequence[Sequence[float | None]],
    neighbours: int = NEIGHBOURS,
) -> list[float]:
    """Expected natural logarithm of each kernel's time over the best, at features `at`.

    `slowdowns[i][k]` is kernel k's time over the best known on measured problem i, None where it cannot serve it.
    The nearest problems count by the inverse square of their distance.
    """
    nearest = sorted((distance(at, features), i) for i, features in enumerate(measured))[:neighbours]
    weights = [(1.0 / (d * d + 0.01), i) for d, i in nearest]
    total = sum(weight for weight, _ in weights)
    kernels = len(slowdowns[0]) if slowdowns else 0
    return [
        sum(w * (UNKNOWN if (s := slowdowns[i][k]) is None else math.log(s)) for w, i in weights) / total
        for k in range(kernels)
    ]
