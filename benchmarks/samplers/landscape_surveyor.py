"""Which config `landscapes.py` tries next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from evoattn.engine.breeding import Breeder
from evoattn.engine.groups import Group, Kernel
from evoattn.families import registry
from evoattn.model.gpu import GpuSpec

RANDOM_SHARE = 0.5
ANY_FAMILY_SHARE = 0.4
"""Bred configs whose parent is the best of a family chosen at random, not the best of all."""
PARENTS = 8
CROSSOVER_SHARE = 0.35
LATER_WEIGHT = 1e-3
"""Of a group whose turn has not come."""


@dataclass
class Aim:
    """How many right configs each of some problems of a group is to have, and those that it has."""

    problems: tuple[int, ...]
    """Their indexes in the group: the others are not timed."""
    wanted: int = 0
    before: dict[int, int] = field(default_factory=dict)
    """Right configs of earlier recordings, by index."""
    missing: dict[int, int] = field(default_factory=dict)
    """By index, at the last count."""
    turn: bool = True
    """Whether configs are compiled for the group now."""

    def count(self, group: Group, earlier: Iterable[str]) -> None:
        """Look at what is missing; `earlier` are the ids of kernels of earlier recordings."""
        known = set(earlier)
        fresh = [k for k in group.kernels.values() if k.state == "right" and k.id not in known]
        self.missing = {
            i: max(0, self.wanted - self.before.get(i, 0) - sum(i in k.times for k in fresh)) for i in self.problems
        }


def take_turns(groups: list[Group], surveyors: dict[str, Surveyor], wanted: int) -> None:
    """Count, and give the compile processes to the group that misses the fewest configs; to all where none does, or
    nothing is `wanted`."""
    if not wanted:
        return
    for surveyor in surveyors.values():
        surveyor.count()
    misses = {g.name: max(surveyors[g.name].aim.missing.values()) for g in groups}
    least = min(filter(None, misses.values()), default=0)
    for group in groups:
        surveyor = surveyors[group.name]
        surveyor.aim.turn = misses[group.name] == least
        group.spent = 0.0 if surveyor.aim.turn else 1.0
        group.weight = 1.0 if surveyor.aim.turn else LATER_WEIGHT


class Surveyor(Breeder):
    """Half random configs of all families, half children of good ones, some of them of families that lose; most for the
    problem of its aim that has the fewest."""

    def __init__(
        self,
        group: Group,
        gpu: GpuSpec,
        seed: int,
        aim: Aim | None = None,
    ) -> None:
        super().__init__(group, gpu, seed)
        self.aim = aim or Aim(tuple(range(len(group.problems))))
        self._earlier = set(group.kernels)
        for identity in group.kernels:  # of earlier recordings
            self._pool.mark(identity)
        self.count()

    def count(self) -> None:
        """Look anew at what the problems of the aim miss."""
        self.aim.count(self._group, self._earlier)

    def serves(self, kernel: Kernel) -> list[int]:
        """Problems of the aim for which a search could propose the kernel."""
        family, config = registry.lookup(kernel.family), kernel.config
        return [i for i in self.aim.problems if not family.why_invalid(self._group.problems[i], config, self._gpu)]

    def propose(self) -> tuple[Kernel, int] | None:
        """See `Breeder`; nothing out of turn."""
        return super().propose() if self.aim.turn else None

    def _next_target(self) -> int:
        indexes = list(self.aim.missing)
        return self._rng.choices(indexes, [1 + self.aim.missing[i] for i in indexes])[0]

    def _breed(self) -> tuple[str, dict[str, Any], str] | None:
        rng = self._rng
        family = rng.choice(list(self.spaces))
        leaders = self._group.leaders(self._target, len(self._group.kernels))
        if rng.random() < ANY_FAMILY_SHARE:
            leaders = [k for k in leaders if k.family == family]
        if not leaders or rng.random() < RANDOM_SHARE:
            return family, {p.name: rng.choice(p.values) for p in self.spaces[family].parameters}, "random"
        parent, other = (leaders[min(int(rng.expovariate(3 / PARENTS)), len(leaders) - 1)] for _ in range(2))
        params, origin = self.spaces[parent.family].completed(parent.params), "mutation"
        if other.family == parent.family and other is not parent and rng.random() < CROSSOVER_SHARE:
            others = self.spaces[other.family].completed(other.params)
            params = {name: (others if rng.random() < 0.5 else params)[name] for name in params}
            origin = "crossover"
        return parent.family, self._pool.mutate(parent.family, params), origin
