"""Which config to try next in a group: those that were given, children of the fastest, and some at random."""

import random
from typing import Any

from evoattn.engine.groups import Group, Kernel
from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.space import KernelConfig, SearchSpace
from evoattn.samplers.base import ConfigPool

RANDOM_SHARE = 0.12
CROSSOVER_SHARE = 0.35
PARENTS = 5
"""Fastest kernels of the chosen problem that may be parents, the first the likeliest."""
TRIES = 8
GIVEN_FIRST, GIVEN_SHARE = 24, 0.4
"""Given configs, in random order: so many before any child, then this share of the proposals until they are used up."""


class Breeder:
    """Proposes configs for one group; every one is valid for at least one of its problems and given out once."""

    def __init__(self, group: Group, gpu: GpuSpec, seed: int) -> None:
        self._group, self._gpu = group, gpu
        self._rng = random.Random(f"{seed} {group.name}")
        self._target = 0
        spaces = {}
        for name in group.families:
            family = registry.lookup(name)
            if any(not family.why_unsupported(p, gpu) for p in group.problems):
                free = (p for p in group.problems if not p.batch_invariant)
                spaces[name] = family.space(next(free, group.problems[0]), gpu)
        self.spaces: dict[str, SearchSpace] = spaces
        self._contenders = [registry.contenders(p, gpu, spaces) for p in group.problems]
        """Of each problem."""
        self._pool = ConfigPool(spaces, self._why_invalid, self._rng)
        for known in group.kernels:
            self._pool.mark(known)
        self._given = [g for g in group.given if g[0] in spaces]
        self._rng.shuffle(self._given)
        self._first = min(GIVEN_FIRST, len(self._given))

    def _why_invalid(self, family: str, params: dict[str, Any]) -> str | None:
        problem = self._group.problems[self._target]
        return registry.lookup(family).why_invalid(problem, KernelConfig(family, params), self._gpu)

    def serves(self, kernel: Kernel) -> list[int]:
        """Indexes of the group's problems that the kernel can run."""
        family, config = registry.lookup(kernel.family), kernel.config
        return [
            i
            for i, p in enumerate(self._group.problems)
            if kernel.family in self._contenders[i] and not family.why_impossible(p, config, self._gpu)
        ]

    def _made_for(self, kernel: Kernel) -> list[int]:
        """Those of `serves` on which nothing of the kernel is redundant."""
        family, config = registry.lookup(kernel.family), kernel.config
        return [i for i in self.serves(kernel) if not family.why_invalid(self._group.problems[i], config, self._gpu)]

    def propose(self) -> tuple[Kernel, int] | None:
        """A new kernel and the problem that it is bred for; None when nothing new was found in some tries."""
        while self._given and (self._first or self._rng.random() < GIVEN_SHARE):
            family, params = self._given.pop(0)
            known = self._pool.known(family, params)
            if known is None:
                continue
            kernel = Kernel(family, known, "given")
            valid = self._made_for(kernel)
            if valid and self._pool.mark(kernel.id):
                self._first = max(0, self._first - 1)
                return kernel, self._rng.choice(valid)
        for _ in range(TRIES):
            self._target = self._next_target()
            if made := self._breed():
                family, params, origin = made
                if claimed := self._pool.claim(family, params):
                    return Kernel(family, claimed, origin), self._target
        return None

    def _next_target(self) -> int:
        return self._rng.randrange(len(self._group.problems))

    def parents(self) -> list[Kernel]:
        """The kernels that children are bred of for the problem that is the target now, the best first."""
        return self._group.leaders(self._target, PARENTS)

    def _breed(self) -> tuple[str, dict[str, Any], str] | None:
        leaders = self.parents()
        supported = [family for family in self.spaces if family in self._contenders[self._target]]
        if not supported:
            return None
        if not leaders or self._rng.random() < RANDOM_SHARE:
            family = self._rng.choice(supported)
            return family, {p.name: self._rng.choice(p.values) for p in self.spaces[family].parameters}, "random"
        parent = leaders[min(int(self._rng.expovariate(0.7)), len(leaders) - 1)]
        others = [k for k in leaders if k.family == parent.family and k is not parent]
        params, origin = self.spaces[parent.family].completed(parent.params), "mutation"
        if others and self._rng.random() < CROSSOVER_SHARE:
            other, origin = self._rng.choice(others), "crossover"
            others_params = self.spaces[other.family].completed(other.params)
            params = {name: (others_params if self._rng.random() < 0.5 else params)[name] for name in params}
        child = self._pool.mutate(parent.family, params)
        if child == parent.params:
            child = self._pool.mutate(parent.family, params)
        return parent.family, child, origin
