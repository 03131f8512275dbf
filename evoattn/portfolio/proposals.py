"""What a search of portfolios proposes, bred from parents that were timed:

- `AimedBreeder`: genes that are aimed at a problem: tiles that fill the SMs, heads of a group as rows, keys shared out
  among blocks; and of several proposals the one that the cost model puts first.
- `ClimbingBreeder`: what a pick could become: the cost model's climbs from a problem's pick and from other shapes, what
  it cannot tell from where they end and what it puts somewhat behind, then neighbours of the fastest kernels: those
  that the cost model expects most of, and any gene's best value."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from evoattn.cost.cost import scores
from evoattn.engine.breeding import PARENTS, Breeder
from evoattn.engine.groups import Group, Kernel
from evoattn.families import registry
from evoattn.families.base import Aim
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio.climb import Costs, Scored, all_genes, beginnings, climb, neighbours
from evoattn.portfolio.pick import likely, portfolio_kernels

Params = dict[str, Any]
Proposal = tuple[str, Params, str]
Step = tuple[KernelConfig, str]
"""A config to try, and its kernel's origin."""

AIMED_SHARE = 0.6
"""Of the proposals; the others are bred as usual."""
SCREENED_AIMED, SCREENED_BRED = 3, 6
"""Each proposal is the best of so many by the cost model, all aimed or all bred: it was not fitted to the youngest
genes."""
UNSCREENED_SHARE = 0.3
FROM_PORTFOLIO = 3
"""Kernels of a problem's class that may be parents before any is timed on it: those of the least predicted times."""
TRIES = 4
"""For a valid config near an aimed one that keeps what was aimed."""


class AimedBreeder(Breeder):
    """Begins at the portfolio's kernels for each problem, and draws genes that can matter there."""

    def __init__(self, group: Group, gpu: GpuSpec, seed: int) -> None:
        super().__init__(group, gpu, seed)
        self._family = next((name for name in self.spaces if registry.lookup(name).aims is not None), "")
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
        return bool(self._family) and not registry.lookup(self._family).why_unsupported(problem, self._gpu)

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
        if aims := registry.lookup(self._family).aims:
            able = [genes for aim in aims if (genes := aim(Aim(problem, params, space, self._gpu, self._rng)))]
            for genes in self._rng.sample(able, min(len(able), self._rng.choice((1, 2)))):
                aimed |= genes
        rows = aimed.get("BLOCK_M", params["BLOCK_M"])
        if rows != params["BLOCK_M"] and (same := [p for p in self._own if p["BLOCK_M"] == rows]):
            params = space.completed(self._rng.choice(same))  # its other genes suit its tiles
        found: Params | None = None
        for _ in range(TRIES):
            found = self._pool.near(self._family, self._pool.mutate(self._family, params) | aimed)
            if found and all(found[name] == value for name, value in aimed.items() if name in AIMED_GENES):
                break
        return (self._family, found, "aimed") if found else None


AIMED_GENES = ("KEY_SPLIT", "GROUP_ROWS", "BLOCK_M", "BLOCK_N")
"""Those that a valid config near an aimed one must keep."""


CLIMBED_SHARE = 0.7
"""Of the proposals; the others are aimed and bred."""
STEPS, KEPT = 8, 12
"""Steps of a climb, and configs that are proposed for a problem: the pick, the ends of climbs, those of least cost
first, then rivals, some behind them, and steps."""
RIVALS, RIVAL = 3, 1.03
"""Rivals, and their most cost over the least of all that were scored: scores err by more, so that the one of least
cost is often one whose score errs most."""
BEHINDS, BEHIND = 2, (1.05, 1.15)
"""Configs somewhat behind, and their cost over that of the best end. Of the 51 problems of a check where a search
found a faster kernel than the pick, the cost model scored 43 at the pick's cost or behind it. Where nothing is timed
but what has low scores, no score is found to be too high."""
ALSO_FAR = 1.6
"""Times the least cost of all ends: the end of a climb from another family's best kernel is tried, too. Scores of
families err by up to 1.4 times against one another."""
LEADERS, BEST_OF = 3, 3
"""Of so many fastest kernels one is a parent, and of so many neighbours of least cost one is proposed."""
BESIDE_SHARE = 0.5
"""Of the proposals that are not bred, once LEADERS kernels are timed on the problem: neighbours of these. The others,
and all before, are what climbs came to."""
ANY_GENE_SHARE = 0.5
"""Of the neighbours: the best value of a gene that is drawn, however much the model expects it to cost. What the model
thinks too slow would never be timed else."""


class ClimbingBreeder(AimedBreeder):
    """Tries what the cost model would change of the pick: whether it is right there is what is to be learnt."""

    def __init__(self, group: Group, gpu: GpuSpec, seed: int) -> None:
        super().__init__(group, gpu, seed)
        self._steps = dict[int, list[Step]]()
        self._genes = {name: all_genes(space) for name, space in self.spaces.items()}

    def _breed(self) -> Proposal | None:
        problem = likely(self._group.problems[self._target])
        if self._rng.random() < CLIMBED_SHARE:
            turns: list[Callable[[], Step | None]] = [self._next_step, partial(self._beside, problem)]
            timed = len(self._group.leaders(self._target, LEADERS)) == LEADERS
            if timed and self._rng.random() < BESIDE_SHARE:
                turns.reverse()
            if step := turns[0]() or turns[1]():
                return step[0].family, step[0].params, step[1]
        return super()._breed()

    def steps(self, target: int) -> list[Step]:
        """What climbs for a problem of the group come to, valid configs in the order in which they are to be tried."""
        self._target = target
        problem = likely(self._group.problems[target])
        ranked = [c for c in portfolio_kernels(problem, self._gpu) if c.family in self.spaces]
        costs = Costs(problem, self._gpu)
        starts = beginnings(sorted(costs.of(ranked), key=lambda s: s.score)) if ranked else []
        starts += self._of_other_families(problem, ranked, {s.config.family for s in starts}, costs)
        climbs = [climb(s.config, problem, self._gpu, STEPS, self._genes[s.config.family], costs) for s in starts]
        ends = sorted((steps[-1] for steps in climbs), key=lambda s: s.score)
        least = min((end.score for end in ends), default=0.0)
        ends = [end for end in ends if end.score <= ALSO_FAR * least]
        others = sorted((step for steps in climbs for step in steps[:-1]), key=lambda s: s.score)
        rivals = self._unlike(costs.within(RIVAL), ends, RIVALS)
        behind = [s for s in costs.within(BEHIND[1]) if s.score >= BEHIND[0] * least]
        behind = self._unlike(behind, ends + rivals, BEHINDS)
        found = {config.id: (config, "given") for config in ranked[:1]}
        for origin, scored in (("climbed", ends), ("rival", rivals), ("behind", behind), ("climbed", others)):
            for config in (one.config for one in scored if one.score <= ALSO_FAR * least):
                if not self._why_invalid(config.family, config.params):
                    found.setdefault(config.id, (config, origin))
        return list(found.values())[:KEPT]

    def _of_other_families(
        self, problem: AttentionProblem, ranked: Sequence[KernelConfig], begun: set[str], costs: Costs
    ) -> list[Scored]:
        """The kernel of least cost of each family that no climb begins with, of the class's and the starting ones."""
        found = []
        for name in registry.contenders(problem, self._gpu, self.spaces):
            if name in begun:
                continue
            family, space = registry.lookup(name), self.spaces[name]
            configs = [c for c in ranked if c.family == name] + space.starting_configs()
            able = [c for c in configs if not family.why_invalid(problem, c, self._gpu)]
            if able:
                found.append(min(costs.of(able), key=lambda one: one.score))
        return found

    def _unlike(self, among: Sequence[Scored], beside: Sequence[Scored], count: int) -> list[Scored]:
        """`count` that differ in most genes from one another and from those `beside`; of equal ones any."""
        left = self._rng.sample(among, len(among))
        chosen: list[Scored] = []
        while left and len(chosen) < count:
            farthest = max(left, key=lambda one: min((_differ(one, other) for other in [*beside, *chosen]), default=0))
            if any(farthest.config.id == other.config.id for other in (*beside, *chosen)):
                break
            left.remove(farthest)
            chosen.append(farthest)
        return chosen

    def _next_step(self) -> Step | None:
        """The next of the target's `steps` that the group has not tried."""
        if self._target not in self._steps:
            self._steps[self._target] = self.steps(self._target)
        steps = self._steps[self._target]
        while steps:
            config, origin = steps.pop(0)
            if config.id not in self._group.kernels and config.family in self.spaces:
                return config, origin
        return None

    def _beside(self, problem: AttentionProblem) -> Step | None:
        """A neighbour of one of the fastest kernels that the group has not tried, one of those of least cost."""
        parents = self.parents()[:LEADERS]
        if not parents:
            return None
        parent, best_of = self._rng.choice(parents).config, BEST_OF
        near = neighbours(parent, problem, self._gpu, self._genes[parent.family])
        fresh = [config for config in near if config.id not in self._group.kernels]
        if fresh and self._rng.random() < ANY_GENE_SHARE:
            fresh, best_of = self._of_a_gene(parent, fresh), 1
        costs = scores(problem, fresh, self._gpu) if fresh else []
        ranked = sorted(range(len(fresh)), key=lambda i: costs[i])
        return (fresh[self._rng.choice(ranked[:best_of])], "beside") if ranked else None

    def _of_a_gene(self, parent: KernelConfig, near: list[KernelConfig]) -> list[KernelConfig]:
        """Those that differ from the parent in a gene that is drawn of those in which some do."""
        changed = [{name for name, value in config.params.items() if parent[name] != value} for config in near]
        gene = self._rng.choice(sorted(set.union(*changed)))
        return [config for config, genes in zip(near, changed, strict=True) if gene in genes]


def _differ(one: Scored, other: Scored) -> int:
    """Genes in which two configs differ; of two families all."""
    a, b = one.config, other.config
    return len(a.params) if a.family != b.family else sum(a.params[name] != value for name, value in b.params.items())
