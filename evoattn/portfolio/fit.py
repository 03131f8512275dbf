"""What is fitted to the measured times of a group of problems: constants of every kernel, and what they leave over.

Whoever judges a fit leaves the judged problems out of all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from evoattn.portfolio.likeness import likeness, smooth, spread_points

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

PRIOR_TIMES, BORROWED_TIMES = 0.3, 3.0
"""See `fit`: for what is usual in the group itself, and in another one. With a fifth of the problems left out, campaign
h's lost 10.0 % in fp32 with 0.03 and 8.6 % with 0.3; some groups of 16 bits 5.3 % with 0.03, 4.3 with 0.1, 4.1 with
0.5. Campaign k's (twelve in a group, one stumbled time aside) lost 7.3 % with 0.3 of another group, 6.9 with 3, 7.6
with 30."""
FEWEST_ERRORS = 20
"""Times of a kernel from which on errors are carried over: with fewer, classes of fp32 lost more."""
POINT_DIGITS = 2
"""Behind the point of a scaled feature."""
FOLDS = 8
"""Parts of the problems of which one is left out at a time."""


@dataclass(frozen=True)
class Usual:
    """What the constants of a family are on the whole: `constants`, and the part of a time that each term makes."""

    constants: Floats
    shares: Floats


def usual(work: Floats, us: Floats) -> Usual:
    """Of many kernels of one family together. `work` [times, terms], `us` [times]."""
    return Usual(fit(work, us), (work / us[:, None]).mean(axis=0))


def fit(work: Floats, us: Floats, prior: Usual | None = None, prior_times: float = PRIOR_TIMES) -> Floats:
    """The non-negative constants that make the relative errors of the times least. `work` [times, terms], `us` [times].

    With a `prior`, a departure from the family's constants that changes a time by its whole counts as much as
    `prior_times` measured times that are wrong by their whole: what few times say nothing of is as is usual.
    """
    from scipy.optimize import nnls  # only whoever builds a portfolio needs SciPy

    rows, wanted = work / us[:, None], np.ones(len(us))
    if prior is not None:
        weight = math.sqrt(prior_times) * np.maximum(prior.shares, 1e-9)
        rows = np.vstack([rows, np.diag(weight)])
        wanted = np.concatenate([wanted, weight * prior.constants])
    q, r = np.linalg.qr(rows)  # the same least squares, of as many rows as there are terms
    return np.asarray(nnls(r, q.T @ wanted)[0])


class View(NamedTuple):
    """Problems as their work: `work` [kernels, problems, terms] and `scaled` [problems, features]."""

    work: Floats
    scaled: Floats


@dataclass(frozen=True)
class Fitted:
    """`constants` [kernels, terms], and by way of `points` [points, features] the logarithm of measured over so
    predicted time: `weights` [kernels, points], none where a kernel has few times."""

    constants: Floats
    points: Floats
    weights: Floats

    def predict(self, work: Floats, scaled: Floats) -> Floats:
        """µs [problems, kernels] of problems whose `work` is [kernels, problems, terms] and whose features are
        `scaled` [problems, features]."""
        errors = likeness(scaled, self.points) @ self.weights.T
        return np.asarray(np.einsum("kpt,kt->pk", work, self.constants) * np.exp(errors))

    def expect(self, views: Sequence[View]) -> Floats:
        """µs [problems, kernels], the geometric mean of those of several views."""
        times = [self.predict(*view) for view in views]
        return np.asarray(np.prod(times, axis=0) ** (1 / len(times)))


@dataclass(frozen=True)
class Table:
    """The times `us` [problems, kernels] of one group, NaN where a kernel cannot serve a problem, or was not timed.

    `work` [kernels, problems, terms], `scaled` [problems, features] (`likeness.scaled`), the kernels' `families`, and
    the columns of each compiled source, `units`. `borrowed`: what is usual of families in a group of more problems, for
    one that has few. `seen`: the problems as a choice sees them (`known.visible`), where lengths are known to the
    device alone; constants are fitted to what they are.
    """

    us: Floats
    work: Floats
    scaled: Floats
    families: Sequence[str]
    units: Sequence[Sequence[int]]
    borrowed: Mapping[str, Usual] = field(default_factory=dict)
    seen: Sequence[View] = ()

    def as_seen(self, rows: Sequence[int]) -> list[View]:
        """These problems as a choice sees them."""
        seen = self.seen or [View(self.work, self.scaled)]
        return [View(view.work[:, rows], view.scaled[rows]) for view in seen]

    def fit(self, rows: Sequence[int]) -> Fitted:
        """Of these problems alone."""
        us, work, scaled = self.us[rows], self.work[:, rows], self.scaled[rows]
        families = set(self.families)
        priors = {f: self.borrowed.get(f) or self._usual(f, us, work) for f in families}
        times = {f: BORROWED_TIMES if f in self.borrowed else PRIOR_TIMES for f in families}
        constants = np.zeros((us.shape[1], work.shape[2]))
        for unit in self.units:
            family = self.families[unit[0]]
            columns, prior = list(unit), priors[family]
            problems, variants = np.nonzero(~np.isnan(us[:, columns]))
            picked = np.array(columns)[variants]
            if len(problems):
                constants[columns] = fit(work[picked, problems], us[problems, picked], prior, times[family])
            elif prior:
                constants[columns] = prior.constants
        points = scaled[spread_points(scaled)].round(POINT_DIGITS)
        weights = np.zeros((us.shape[1], len(points)))
        for column in range(us.shape[1]):
            timed = ~np.isnan(us[:, column])
            if timed.sum() >= FEWEST_ERRORS:
                errors = np.log(us[timed, column] / (work[column, timed] @ constants[column]))
                weights[column] = smooth(points, scaled[timed], errors)
        return Fitted(constants, points, weights)

    def times_of(self, family: str) -> tuple[Floats, Floats]:
        """(work [times, terms], µs [times]) of all kernels of a family."""
        return self._times_of(family, self.us, self.work)

    def _times_of(self, family: str, us: Floats, work: Floats) -> tuple[Floats, Floats]:
        columns = [c for c, name in enumerate(self.families) if name == family]
        problems, variants = np.nonzero(~np.isnan(us[:, columns]))
        picked = np.array(columns, dtype=int)[variants]
        return work[picked, problems], us[problems, picked]

    def _usual(self, family: str, us: Floats, work: Floats) -> Usual | None:
        """None where no kernel of the family was timed."""
        rows, times = self._times_of(family, us, work)
        return usual(rows, times) if len(times) else None

    def left_out(self, rows: Sequence[int]) -> tuple[Floats, Floats]:
        """µs [rows, kernels] as predicted by fits of the other rows, an equal part of them left out at a time: of the
        problems as they are, and as a choice sees them."""
        predicted, chosen_by = (np.full((len(rows), self.us.shape[1]), np.nan) for _ in range(2))
        for places in parts(len(rows), FOLDS):
            left, out = set(places), [rows[i] for i in places]
            fitted = self.fit([row for i, row in enumerate(rows) if i not in left])
            predicted[places] = fitted.predict(self.work[:, out], self.scaled[out])
            chosen_by[places] = fitted.expect(self.as_seen(out))
        return predicted, chosen_by


def parts(count: int, folds: int) -> list[list[int]]:
    """The numbers below `count` in at most `folds` lists of about equal length, drawn at random but always the same."""
    order = np.random.default_rng(0).permutation(count)
    return [sorted(order[fold::folds].tolist()) for fold in range(min(folds, count))]
