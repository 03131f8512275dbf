"""Proposals that a pick could become: the cost model's climbs from a problem's pick and from other shapes, what it
cannot tell from where they end, then neighbours of its fastest kernels: those that the cost model expects most of, and
any gene's best value."""

from __future__ import annotations

from evoattn.cost.cost import scores
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio.engine.aimed import AimedBreeder, Proposal
from evoattn.portfolio.engine.kernel import Group
from evoattn.portfolio.known import known
from evoattn.portfolio.pick import portfolio_kernels
from evoattn.portfolio.refine import Costs, all_genes, beginnings, climb, neighbours

CLIMBED_SHARE = 0.7
"""Of the proposals; the others are aimed and bred."""
STEPS, KEPT = 8, 8
"""Of each climb; of a problem so many are proposed: the ends, those of least cost first, then rivals and steps."""
RIVALS, RIVAL = 3, 1.03
"""So many that cost at most so many times the least of all that were scored: scores err by more, so that the one of
least cost is often one whose score errs most."""
LEADERS, BEST_OF = 3, 3
"""Of so many fastest kernels one is a parent, and of so many neighbours of least cost one is proposed."""
ANY_GENE_SHARE = 0.5
"""Of the neighbours: the best value of a gene that is drawn, however much the model expects it to cost. What the model
thinks too slow would never be timed else."""


class ClimbingBreeder(AimedBreeder):
    """Tries what the cost model would change of the pick: whether it is right there is what is to be learnt."""

    def __init__(self, group: Group, gpu: GpuSpec, seed: int) -> None:
        super().__init__(group, gpu, seed)
        self._steps: dict[int, list[KernelConfig]] = {}
        self._genes = {name: all_genes(space) for name, space in self.spaces.items()}

    def _breed(self) -> Proposal | None:
        problem = known(self._group.problems[self._target])
        if self._rng.random() < CLIMBED_SHARE and (made := self._next_step(problem) or self._beside(problem)):
            return made.family, made.params, "climbed"
        return super()._breed()

    def _next_step(self, problem: AttentionProblem) -> KernelConfig | None:
        """The next step of the climbs for the problem that the group has not tried."""
        if self._target not in self._steps:
            ranked = [c for c in portfolio_kernels(problem, self._gpu) if c.family in self.spaces]
            costs = Costs(problem, self._gpu)
            starts = beginnings(ranked, problem, self._gpu, self._genes, costs)
            climbs = [climb(s.config, problem, self._gpu, STEPS, self._genes[s.config.family], costs) for s in starts]
            ends, others = [steps[-1] for steps in climbs], [step for steps in climbs for step in steps[:-1]]
            ends.sort(key=lambda s: s.score)
            rivals = [s for s in costs.within(RIVAL) if s.config.id not in {e.config.id for e in ends}]
            rivals = self._rng.sample(rivals, min(len(rivals), RIVALS))
            ordered = ends + rivals + sorted(others, key=lambda s: s.score)
            self._steps[self._target] = list({s.config.id: s.config for s in ordered}.values())[:KEPT]
        steps = self._steps[self._target]
        while steps:
            config = steps.pop(0)
            redundant = self._why_invalid(config.family, config.params) if config.family in self.spaces else "no space"
            if config.id not in self._group.kernels and not redundant:
                return config
        return None

    def _beside(self, problem: AttentionProblem) -> KernelConfig | None:
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
        return fresh[self._rng.choice(ranked[:best_of])] if ranked else None

    def _of_a_gene(self, parent: KernelConfig, near: list[KernelConfig]) -> list[KernelConfig]:
        """Those that differ from the parent in a gene that is drawn of those in which some do."""
        changed = [{name for name, value in config.params.items() if parent[name] != value} for config in near]
        gene = self._rng.choice(sorted(set.union(*changed)))
        return [config for config, genes in zip(near, changed, strict=True) if gene in genes]
