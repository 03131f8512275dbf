"""What climbs come to where keys are read for few queries, as for a token over a cache that grows: they are made for
some numbers of keys alone, and a number between two of them takes the end for the greater one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio.climbs import MOST_KEPT, Climbs, Refined
from evoattn.portfolio.refine import Genes, refined
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
    """As `refined`, where `kernels` and `genes` are what `begin` gives for `problem`; with few queries the end for the
    number of keys that climbs are made for (`rounding.climbed`), or the first of `kernels` where that cannot serve the
    problem."""
    if not is_few(problem):
        return refined(kernels, problem, gpu, genes, climbs)
    end = _end(begin, climbed(problem), gpu, climbs)
    if end is None or registry.lookup(end.config.family).why_impossible(problem, end.config, gpu):
        return Refined(kernels[0], 1.0, 0)
    return end


@lru_cache(MOST_KEPT)
def _end(begin: Begin, problem: AttentionProblem, gpu: GpuSpec, climbs: Climbs) -> Refined | None:
    kernels, genes = begin(problem, gpu)
    return refined(kernels, problem, gpu, genes, climbs) if kernels else None
