"""A problem that searches of several problems change configs for, as a family's `aims` see it."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import SearchSpace

Params = dict[str, Any]


@dataclass(frozen=True)
class Aim:
    """A problem, a config to change for it, and what it is changed with."""

    problem: AttentionProblem
    params: Params
    space: SearchSpace
    gpu: GpuSpec
    rng: random.Random

    def values(self, gene: str) -> tuple[Any, ...]:
        """The values that a gene can have."""
        return next(p.values for p in self.space.parameters if p.name == gene)


Aimed = Callable[[Aim], Params]
"""Draws values of some genes that suit the problem; empty where it has none to offer."""
