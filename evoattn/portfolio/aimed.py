"""Proposals that are aimed at a problem: tiles that fill the SMs, heads of a group as rows, keys shared out among
blocks; and of several the one that the cost model puts first."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evoattn.cost.cost import scores
from evoattn.engine.breeding import PARENTS, Breeder
from evoattn.engine.groups import Group, Kernel
from evoattn.families import registry
from evoattn.families.flash_wgmma.genes import FlashWgmmaGenes
from evoattn.families.flash_wgmma.resources import merges_in_memory
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, SearchSpace
from evoattn.portfolio.canonical import likely
from evoattn.portfolio.pick import portfolio_kernels

Params = dict[str, Any]
Proposal = tuple[str, Params, str]

AIMED_SHARE = 0.6
"""Of the proposals; the others are bred as usual."""
SCREENED_AIMED, SCREENED_BRED = 3, 6
"""Each proposal is the best of so many by the cost model, all aimed or all bred: it was not fitted to the youngest
genes."""
UNSCREENED_SHARE = 0.3
FROM_PORTFOLIO = 3
"""Kernels of a problem's class that may be parents before any is timed on it: those of the least predicted times."""
AIMED_FAMILY = {"32": "large_head"}
"""By bits, where it is not flash_wgmma."""
BEST_OF = 3
"""Values of a tile's extent from which one is drawn, those that leave least idle."""
TRIES = 4
"""For a valid config near an aimed one that keeps what was aimed."""


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

    def blocks(self, **genes: Any) -> int:
        """Blocks of the config with these genes, without a split of the keys."""
        params = self.params | genes | {"KEY_SPLIT": 1, "SCHEDULE": "single"}
        launch, *_ = registry.lookup("flash_wgmma").work(self.problem, KernelConfig("flash_wgmma", params))
        return launch.blocks


class AimedBreeder(Breeder):
    """Begins at the portfolio's kernels for each problem, and draws genes that can matter there."""

    def __init__(self, group: Group, gpu: GpuSpec, seed: int) -> None:
        super().__init__(group, gpu, seed)
        self._family = AIMED_FAMILY.get(group.name.split()[0], "flash_wgmma")
        self._own = [params for family, params in self._given if family == self._family]

    def parents(self) -> list[Kernel]:
        """Where few were timed on the target, those that its class should run fastest too."""
        found = super().parents()
        if len(found) >= FROM_PORTFOLIO:
            return found
        configs = portfolio_kernels(self._group.problems[self._target], self._gpu)[:FROM_PORTFOLIO]
        return found + [Kernel(c.family, c.params) for c in configs if c.family in self.spaces]

    def _breed(self) -> Proposal | None:
        problem = likely(self._group.problems[self._target])
        breed, count = super()._breed, SCREENED_BRED
        if self._rng.random() < AIMED_SHARE and self._can_aim(problem):
            breed, count = self._aimed, SCREENED_AIMED
        if self._rng.random() < UNSCREENED_SHARE:
            count = 1
        found = []
        for _ in range(count):
            if (made := breed()) and (params := self._pool.near(made[0], made[1])):
                found.append((made[0], params, made[2]))
        if len(found) < 2:
            return found[0] if found else None
        costs = scores(problem, [KernelConfig(family, params) for family, params, _ in found], self._gpu)
        return found[costs.index(min(costs))]

    def _can_aim(self, problem: AttentionProblem) -> bool:
        family = registry.lookup(self._family)
        return self._family in self.spaces and not family.why_unsupported(problem, self._gpu)

    def _aimed(self) -> Proposal | None:
        """A parent with one or two genes that are drawn for the problem."""
        problem, space = likely(self._group.problems[self._target]), self.spaces[self._family]
        timed = self._group.leaders(self._target, len(self._group.kernels))
        best = [k.params for k in timed if k.family == self._family][:PARENTS]
        parents = best or [k.params for k in self.parents() if k.family == self._family]
        if self._own and (not parents or self._rng.random() < 1 / (1 + len(parents))):
            parents = [self._rng.choice(self._own)]
        if not parents:
            return None
        params, aimed = space.completed(self._rng.choice(parents)), Params()
        if self._family == "flash_wgmma":
            able = [genes for aim in AIMS if (genes := aim(Aim(problem, params, space, self._gpu, self._rng)))]
            for genes in self._rng.sample(able, min(len(able), self._rng.choice((1, 2)))):
                aimed |= genes
        rows = aimed.get("BLOCK_M", params["BLOCK_M"])
        if rows != params["BLOCK_M"] and (same := [p for p in self._own if p["BLOCK_M"] == rows]):
            params = space.completed(self._rng.choice(same))  # its other genes suit its tiles
        found: Params | None = None
        for _ in range(TRIES):
            found = self._pool.near(self._family, self._pool.mutate(self._family, params) | aimed)
            if found and all(found[name] == aimed[name] for name in KEPT if name in aimed):
                break
        return (self._family, found, "aimed") if found else None


def split_keys(aim: Aim) -> Params:
    """As many blocks on the keys of the same rows as fit on the SMs at once, or half as many."""
    slots = aim.gpu.sm_count * aim.params["BLOCKS_PER_SM"]
    most = min(slots // aim.blocks(), math.ceil(aim.problem.seqlen_k / aim.params["BLOCK_N"]))
    splits = [s for s in aim.values("KEY_SPLIT") if 1 < s <= most]
    if not splits:
        return {}
    split = aim.rng.choice(splits[-2:])
    changed: Params = {"KEY_SPLIT": split, "SCHEDULE": "single"}
    genes = FlashWgmmaGenes.of(KernelConfig("flash_wgmma", aim.params | changed))
    return changed | ({"STORE": "rows"} if merges_in_memory(aim.problem, genes) else {})


def group_rows(aim: Aim) -> Params:
    """The query heads of a K/V head as rows of the same tiles, or no longer."""
    return {"GROUP_ROWS": not aim.params["GROUP_ROWS"]} if aim.problem.group_size > 1 else {}


def fill_waves(aim: Aim) -> Params:
    """Rows of a tile and blocks per SM that leave few SMs idle in the last wave."""
    choices = []
    for block_m in aim.values("BLOCK_M"):
        for resident in aim.values("BLOCKS_PER_SM"):
            waves = math.ceil(aim.blocks(BLOCK_M=block_m) / (aim.gpu.sm_count * resident))
            if block_m * resident <= max(aim.values("BLOCK_M")):  # whose outputs fit in the registers of an SM
                choices.append((waves * block_m * resident, aim.rng.random(), block_m, resident))
    *_, block_m, resident = aim.rng.choice(sorted(choices)[:BEST_OF])
    genes = {"BLOCK_M": block_m, "BLOCKS_PER_SM": resident}
    return {} if genes.items() <= aim.params.items() else genes


def fit_keys(aim: Aim) -> Params:
    """Tiles of keys of which the last is nearly full, and no more stages than there are tiles."""
    padded = sorted((math.ceil(aim.problem.seqlen_k / n) * n, -n) for n in aim.values("BLOCK_N"))
    block_n = -aim.rng.choice(padded[:BEST_OF])[1]
    if block_n == aim.params["BLOCK_N"]:
        return {}
    tiles = math.ceil(aim.problem.seqlen_k / block_n / aim.params["KEY_SPLIT"])
    return {"BLOCK_N": block_n, "STAGES": max(1, min(aim.params["STAGES"], tiles))}


AIMS: tuple[Callable[[Aim], Params], ...] = (split_keys, group_rows, fill_waves, fit_keys)
KEPT: Sequence[str] = ("KEY_SPLIT", "GROUP_ROWS", "BLOCK_M", "BLOCK_N")
