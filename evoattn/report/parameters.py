"""The parts of a summary that are about parameters, as plain records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Importance:
    """How much each parameter of one family tells the best tenth of its trials from all: shares that add up to 1, by
    PED-ANOVA."""

    family: str
    trials: int
    """Right trials of the family."""
    shares: dict[str, float]
    """Largest first; empty where `why_not` says why."""
    why_not: str


@dataclass(frozen=True)
class GeneValue:
    """One value of one parameter among the right trials of its family. Times are in µs, or relative costs."""

    family: str
    gene: str
    value: Any
    trials: int
    best: float
    median: float
    top_share: float
    """Among the best twentieth, 0 to 1."""
    share: float
    """Among all."""
    effect: float | None
    """Median of its time over the best other value's where all else is equal: under 1 it is faster."""
    pairs: int
    tells: bool
    """Whether the trials say anything of this value: a paired effect, or a share among enough of the best that is not
    by chance."""


@dataclass(frozen=True)
class FamilySample:
    """Right trials of one family, best first, with their parameters: all of them, or the best and an even sample of
    the rest."""

    family: str
    values: dict[str, tuple[Any, ...]]
    """The values seen of each parameter, in order."""
    trial: list[int]
    value: list[float]
    """µs or relative cost."""
    columns: dict[str, list[int | None]]
    """Per parameter and trial: the index in `values`; None where the trial lacks the parameter."""
