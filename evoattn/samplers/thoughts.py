"""Configs that a sampler thinks of before it proposes one, and how they are written as rows of features."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evoattn.model.space import SearchSpace, config_id
from evoattn.samplers.base import Prior
from evoattn.samplers.pool import ConfigPool, Params

Array = NDArray[np.float64]

REPAIR_STEPS = 12
"""Changes to an invalid config before it is given up: another one is as good."""
CROSSOVER_SHARE = 0.5
Config = tuple[str, Params]


class Thought(NamedTuple):
    """A config that a sampler considers, and may propose. `prior` is the natural logarithm of its time over the best's,
    as the cost model or times of other problems let expect."""

    family: str
    params: Params
    row: Array
    prior: float


class Encoder:
    """Configs of several families as rows of equal length: which family, then every gene by its place among its values,
    -1 where the family has no such gene."""

    def __init__(self, spaces: dict[str, SearchSpace]) -> None:
        self._families = list(spaces)
        names = dict.fromkeys(p.name for s in spaces.values() for p in s.parameters if len(p.values) > 1)
        columns = {name: len(spaces) + i for i, name in enumerate(names)}
        self._width = len(spaces) + len(columns)
        self._places = {
            family: [
                (p.name, columns[p.name], {value: i for i, value in enumerate(p.values)})
                for p in space.parameters
                if p.name in columns
            ]
            for family, space in spaces.items()
        }

    def row(self, family: str, params: Params) -> Array:
        """`[columns]`: 1 for its family and 0 for the others, then each gene's place among its values, -1 where the
        family has no such gene."""
        row = np.full(self._width, -1.0)
        row[: len(self._families)] = 0.0
        row[self._families.index(family)] = 1.0
        for name, column, places in self._places[family]:
            row[column] = places[params[name]]
        return row


class Thinker:
    """Makes thoughts: of given configs, at random, or bred from others. What it made of a config is kept."""

    def __init__(self, pool: ConfigPool, prior: Prior | None) -> None:
        self._pool, self._prior, self._rng = pool, prior, pool.rng
        self._encoder = Encoder(pool.spaces)
        self._made: dict[str, Thought] = {}

    def of(self, configs: Iterable[Config]) -> dict[str, Thought]:
        """The thoughts of configs as they are, by config id."""
        named = {config_id(family, params): (family, params) for family, params in configs}
        fresh = {identity: config for identity, config in named.items() if identity not in self._made}
        priors = self._prior(list(fresh.values())) if self._prior and fresh else [0.0] * len(fresh)
        for (identity, (family, params)), prior in zip(fresh.items(), priors, strict=True):
            self._made[identity] = Thought(family, params, self._encoder.row(family, params), prior)
        return {identity: self._made[identity] for identity in named}

    def near(self, configs: Iterable[Config]) -> dict[str, Thought]:
        """Valid new configs near given ones, or these themselves."""
        valid = ((family, self._pool.near(family, params, REPAIR_STEPS)) for family, params in configs)
        return self.of((family, params) for family, params in valid if params is not None)

    def random(self, count: int) -> list[Config]:
        """Configs of families chosen at random; they may be invalid."""
        drawn = (self._rng.choice(list(self._pool.spaces)) for _ in range(count))
        return [(f, {p.name: self._rng.choice(p.values) for p in self._pool.spaces[f].parameters}) for f in drawn]

    def bred(self, parents: Sequence[Thought], count: int) -> list[Config]:
        """Children of `parents`, which stand best first; they may be invalid. None where there are no parents."""
        return [self._child(parents) for _ in range(count if parents else 0)]

    def _child(self, parents: Sequence[Thought]) -> Config:
        one, other = self._parent(parents), self._parent(parents)
        params = dict(one.params)
        if other.family == one.family and self._rng.random() < CROSSOVER_SHARE:
            params = {name: (other.params if self._rng.random() < 0.5 else params)[name] for name in params}
        return one.family, self._pool.mutate(one.family, params)

    def _parent(self, parents: Sequence[Thought]) -> Thought:
        """The better of two."""
        return parents[min(self._rng.randrange(len(parents)), self._rng.randrange(len(parents)))]

    def forget(self, kept: Iterable[str]) -> None:
        """Drop all thoughts but those of the config ids `kept`."""
        self._made = {identity: self._made[identity] for identity in kept}


def first_of_each_value(thoughts: Iterable[Thought]) -> list[Thought]:
    """For each value of each gene the first of a family's thoughts that has it, each thought once."""
    first: dict[tuple[str, Any], Thought] = {}
    for thought in thoughts:
        for gene in thought.params.items():
            first.setdefault(gene, thought)
    return list({id(thought): thought for thought in first.values()}.values())
