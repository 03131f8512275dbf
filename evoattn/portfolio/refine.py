"""Kernels near one of a portfolio that the cost model expects to be faster on a problem: tiles that fit its lengths,
stages, schedules and so on.

A portfolio has few kernels for each class. The cost model (`evoattn/cost`) was fitted to all kernels that were ever
measured, of all classes: it tells what one gene more or less is worth on this problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, SearchSpace, Value
from evoattn.portfolio.climbs import Climbs, Refined
from evoattn.portfolio.rounding import rounded
from evoattn.portfolio.starts import FAMILY, TENSOR_FAMILY, WARP_FAMILY, other_shapes, tensor_shapes, warp_shapes

Genes = Mapping[str, Sequence[Value]]
"""Values that each parameter of a family may have."""
TOGETHER = (("BLOCK_N", "STAGES"), ("BLOCK_M", "BLOCKS_PER_SM"), ("BLOCK_N", "WARPS"), ("GROUP_ROWS", "BLOCK_M"))
"""Genes that are changed both at once, too: what one takes of shared memory or registers the other must leave."""
SAME = 0.001
"""Costs that differ by no more are the same."""
LEAST_GAIN = 0.02
"""Part of a pick's cost that a climb must save, or the pick stays: less is within the cost model's error."""
A_GENE = 0.005
"""Part of its cost that a config must save for each gene that no kernel of the class has beside its others: the class's
were chosen by their times. On 241 problems of a campaign, left out of the fit, a fit's first choice of 40 kernels loses
1.025 without it, 1.023 with it and 1.024 with twice as much; a fit before the campaign 1.033 to 1.034 with any."""
OTHER_FAMILY = 12
"""As so many genes a family counts that no kernel of the class has: left out of the fit, scores of flash_mma with at
most 16 queries err by 5 to 12 %, those of the families that classes have there by 3 to 5 %."""
ROUNDS, STARTS = 6, 3
"""Steps of a climb, and climbs that begin elsewhere than at the pick."""
FAR = 1.25
"""Times the least cost of all starts: a climb from a family's first start has saved a fifth, seldom more."""
ENOUGH = 180
"""Costs that were computed for a pick, from which on no further climb begins: the first call of a shape waits. Of 90
problems the ends cost 0.1 % more than with all climbs."""
AT_ONCE = 6
"""Changes that a step may make together: ends of 90 drawn problems score 0.4 % less so in the same CPU time (by two
other fits 0.5 %). In a check climbs of one change a step had missed kernels that score 4 and 11 % less."""


@dataclass(frozen=True)
class Scored:
    """A config and its cost on the problem (`evoattn.cost.cost.scores`)."""

    config: KernelConfig
    score: float


def all_genes(space: SearchSpace) -> Genes:
    """The values of a whole space."""
    return {p.name: p.values for p in space.parameters}


def neighbours(config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec, genes: Genes) -> list[KernelConfig]:
    """The valid configs that differ from `config` in one gene, or in two of TOGETHER. If something of `config` is
    redundant on the problem, it may be of the others."""
    family = registry.lookup(config.family)
    why_not = family.why_impossible if family.why_invalid(problem, config, gpu) else family.why_invalid
    found = (KernelConfig(config.family, config.params | changed) for changed in _changes(config, genes))
    return [other for other in found if not why_not(problem, other, gpu)]


def _changes(config: KernelConfig, genes: Genes) -> Iterator[dict[str, Value]]:
    others = {name: [v for v in values if v != config[name]] for name, values in genes.items()}
    for name, values in others.items():
        yield from ({name: value} for value in values)
    for names in TOGETHER:
        if all(name in others for name in names):
            yield from (dict(zip(names, both, strict=True)) for both in product(*(others[name] for name in names)))


class Costs:
    """Scores on one problem; each config's is computed once, as neighbours of successive steps are the same in part."""

    def __init__(self, problem: AttentionProblem, gpu: GpuSpec) -> None:
        self._problem, self._gpu = problem, gpu
        self._known: dict[tuple[Value, ...], Scored] = {}

    def __len__(self) -> int:
        """Scores that were computed."""
        return len(self._known)

    def of(self, configs: Sequence[KernelConfig]) -> list[Scored]:
        """The configs and their scores, in the same order."""
        from evoattn.cost.cost import scores  # here: it reads a file of weights

        keys = [(config.family, *config.params.values()) for config in configs]
        if new := {key: config for key, config in zip(keys, configs, strict=True) if key not in self._known}:
            found = scores(self._problem, list(new.values()), self._gpu)
            self._known |= {key: Scored(new[key], score) for key, score in zip(new, found, strict=True)}
        return [self._known[key] for key in keys]

    def within(self, factor: float) -> list[Scored]:
        """All whose score is at most `factor` times the least."""
        least = min((one.score for one in self._known.values()), default=0.0)
        return [one for one in self._known.values() if one.score <= factor * least]


def climb(
    start: KernelConfig,
    problem: AttentionProblem,
    gpu: GpuSpec,
    rounds: int,
    genes: Genes,
    costs: Costs | None = None,
) -> list[Scored]:
    """`start`, then after each round what costs least of its neighbours and of several of their changes `at_once`, for
    as long as the cost falls. If something of `start` is redundant, a neighbour of which nothing is comes before the
    rounds, if one costs no more.

    `costs`: those of the problem, where some are known."""
    costs = Costs(problem, gpu) if costs is None else costs
    found = costs.of([start])
    family = registry.lookup(start.family)
    if family.why_invalid(problem, start, gpu):
        near = [c for c in neighbours(start, problem, gpu, genes) if not family.why_invalid(problem, c, gpu)]
        _step(found, costs.of(near), found[0].score * (1 + SAME))
    for _ in range(rounds):
        scored = costs.of(neighbours(found[-1].config, problem, gpu, genes))
        if not _step(found, scored + costs.of(at_once(found[-1], scored, problem, gpu)), found[-1].score):
            break
    return found


def at_once(start: Scored, near: Sequence[Scored], problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """Valid configs that make several of the changes which lower the cost each: the best two, three and so on. `near`:
    neighbours of `start`, of which only the best change of the same genes counts."""
    best: dict[frozenset[str], tuple[float, dict[str, Value]]] = {}
    for one in near:
        change = {name: value for name, value in one.config.params.items() if value != start.config[name]}
        genes = frozenset(change)
        if one.score < (best[genes][0] if genes in best else start.score):
            best[genes] = one.score, change
    changes = [change for _, change in sorted(best.values(), key=lambda scored: scored[0])][:AT_ONCE]
    if not changes:
        return []
    family, made, found = registry.lookup(start.config.family), changes[0], []
    for change in changes[1:]:
        config = KernelConfig(start.config.family, start.config.params | made | change)
        if made.keys().isdisjoint(change) and not family.why_invalid(problem, config, gpu):
            made = made | change
            found.append(config)
    return found


def _step(found: list[Scored], near: list[Scored], under: float) -> bool:
    """Whether one of the configs costs less than `under`; the one of least cost is added then."""
    best = min(near, key=lambda one: one.score, default=None)
    if best is None or best.score >= under:
        return False
    found.append(best)
    return True


IN_MEMORY = Climbs()
"""What climbs of this process came to."""


def refined(
    ranked: Sequence[KernelConfig],
    problem: AttentionProblem,
    gpu: GpuSpec,
    genes: Mapping[str, Genes],
    climbs: Climbs | None = None,
) -> Refined:
    """The best step of short climbs from the first of the `ranked` kernels of a class and from what else should be
    fast. The first one itself where little is saved so, or that step cannot serve the problem.

    The lengths are rounded, so that a sequence that grows keeps its kernel for some while. `genes`: by family;
    `climbs`: of earlier calls, those of this process unless given.
    """
    about, first = rounded(problem), ranked[0]
    others = tuple(sorted(repr((c.family, *c.params.values())) for c in ranked[1:]))
    key = about, gpu, first.family, tuple(first.params.values()), others
    climbs = IN_MEMORY if climbs is None else climbs
    if (found := climbs.get(key)) is None:
        found = _climbed(ranked, about, gpu, genes)
        climbs.add(key, found)
    if registry.lookup(found.config.family).why_impossible(problem, found.config, gpu):
        return Refined(first, 1.0, found.asked)
    return found


def _climbed(
    ranked: Sequence[KernelConfig], problem: AttentionProblem, gpu: GpuSpec, genes: Mapping[str, Genes]
) -> Refined:
    costs = Costs(problem, gpu)
    starts = beginnings(ranked, problem, gpu, genes, costs)
    if not starts:  # as the lengths are rounded
        return Refined(ranked[0], 1.0, 0)
    first = starts[0]
    steps: list[Scored] = []
    for start in sorted(starts, key=lambda one: one.score):
        if not steps or len(costs) < ENOUGH:
            steps += climb(start.config, problem, gpu, ROUNDS, genes.get(start.config.family, {}), costs)

    end = min(steps, key=lambda one: one.score * (1 + A_GENE * genes_from(ranked, one.config)))
    if end.score < first.score * (1 - LEAST_GAIN):
        return Refined(end.config, first.score / end.score, len(costs))
    return Refined(first.config, 1.0, len(costs))


def genes_from(kernels: Sequence[KernelConfig], config: KernelConfig) -> int:
    """Genes that differ from the nearest of the kernels; OTHER_FAMILY where none is of its family."""
    alike = (k.params for k in kernels if k.family == config.family)
    differ = (sum(other[name] != value for name, value in config.params.items()) for other in alike)
    return min(differ, default=OTHER_FAMILY)


def beginnings(
    ranked: Sequence[KernelConfig],
    problem: AttentionProblem,
    gpu: GpuSpec,
    genes: Mapping[str, Genes],
    costs: Costs,
) -> list[Scored]:
    """The first of the `ranked` kernels that can run, and STARTS of the others, of other shapes of the best of them, of
    tiles of single warps and of fp32 on tensor cores (`evoattn/portfolio/starts.py`): of each further family that of
    least cost, unless it is FAR from the least of all, then those of least cost."""
    able = costs.of([c for c in ranked if _can_run(c, problem, gpu)])
    others = able[1:]
    if shaped := [one for one in able if one.config.family == FAMILY]:
        best = min(shaped, key=lambda one: one.score)
        others += costs.of(other_shapes(best.config, problem, gpu, genes.get(FAMILY, {})))
    if able:
        others += costs.of(warp_shapes(problem, gpu, genes.get(WARP_FAMILY, {})))
        others += costs.of(tensor_shapes(problem, gpu, genes.get(TENSOR_FAMILY, {})))
    others.sort(key=lambda one: one.score)
    least = min((one.score for one in able + others), default=0.0)
    found = able[:1]
    for other in others:  # a family's first
        if other.score <= FAR * least and all(other.config.family != one.config.family for one in found):
            found.append(other)
    found += [other for other in others if other not in found]
    return found[: 1 + STARTS]


def _can_run(config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> bool:
    return not registry.lookup(config.family).why_impossible(problem, config, gpu)
