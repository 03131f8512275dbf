"""What climbs come to where keys are read for few queries, as for a token over a cache that grows: they are made for
some numbers of keys alone, and a number between two of them takes the end that costs less there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio.climbs import MOST_KEPT, Climbs, Refined
from evoattn.portfolio.refine import LEAST_GAIN, Costs, Genes, refined
from evoattn.portfolio.rounding import climbed, is_few

Begin = Callable[[AttentionProblem, GpuSpec], tuple[Sequence[KernelConfig], Mapping[str, Genes]]]
"""Kernels that a problem's climbs begin at, the most promising first, none where none serves it; and by family the
values that genes may take."""


def climbs_end(
    begin: Begin,
    kernels: Sequence[KernelConfig],
    problem: AttentionProblem,
    gpu: GpuSpec,
    genes: Mapping[str, Genes],
    climbs: Climbs,
) -> Refined:
    """As `refined`, where `kernels` and `genes` are what `begin` gives for `problem`; with few queries the better end
    of the climbs for the nearest numbers of keys that climbs are made for (`rounding.climbed`), or the first of
    `kernels` where that saves little.
    """
    if not is_few(problem):
        return refined(kernels, problem, gpu, genes, climbs)
    ends = [end for one in climbed(problem) if (end := _end(begin, one, gpu, climbs))]
    return _between(kernels[0], ends, problem, gpu, climbs)


@lru_cache(MOST_KEPT)
def _end(begin: Begin, problem: AttentionProblem, gpu: GpuSpec, climbs: Climbs) -> Refined | None:
    kernels, genes = begin(problem, gpu)
    return refined(kernels, problem, gpu, genes, climbs) if kernels else None


def _between(
    first: KernelConfig, ends: Sequence[Refined], problem: AttentionProblem, gpu: GpuSpec, climbs: Climbs
) -> Refined:
    others = {end.config.id: end for end in ends if _can_serve(end.config, problem, gpu)}
    if len(others) < 2:
        return next(iter(others.values()), Refined(first, 1.0, 0))
    key = problem, gpu, first.family, tuple(first.params.values()), ("between", *sorted(others))
    found = climbs.get(key)
    if found is None or not _can_serve(found.config, problem, gpu):
        found = _least(first, [end.config for end in others.values()], problem, gpu)
        climbs.add(key, found)
    return found


def _can_serve(config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> bool:
    return not registry.lookup(config.family).why_impossible(problem, config, gpu)


def _least(first: KernelConfig, others: Sequence[KernelConfig], problem: AttentionProblem, gpu: GpuSpec) -> Refined:
    """That of the `others` which costs least, if it saves LEAST_GAIN, else the first."""
    costs = Costs(problem, gpu)
    before, *scored = costs.of([first, *others])
    best = min(scored, key=lambda one: one.score)
    if best.score < before.score * (1 - LEAST_GAIN):
        return Refined(best.config, before.score / best.score, len(costs))
    return Refined(first, 1.0, len(costs))
