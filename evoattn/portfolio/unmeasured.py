"""What may serve a problem that no class of a portfolio is near: known-good configs of all families, changes of them,
and the values of genes that these have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, SearchSpace, load_space
from evoattn.portfolio.refine import Genes, neighbours

MOST_CHANGED = 60
"""Each of them is scored, in some 0.15 ms."""


def spaces_for(problem: AttentionProblem, gpu: GpuSpec, plain: bool) -> list[SearchSpace]:
    """Of the families that serve the problem on the GPU: those of `plain` attention, or those for variants alone. Each
    is read from a file at first, in 5 to 20 ms."""
    able = (f for f in registry.FAMILIES.values() if f.plain == plain and not f.why_unsupported(problem, gpu))
    return [load_space(family.name, gpu) for family in able]


def known_good(problem: AttentionProblem, gpu: GpuSpec, spaces: Sequence[SearchSpace]) -> list[KernelConfig]:
    """The starting configs that are valid for the problem."""
    return [
        config
        for space in spaces
        for config in space.starting_configs()
        if not registry.lookup(space.family).why_invalid(problem, config, gpu)
    ]


def changed(
    problem: AttentionProblem, gpu: GpuSpec, spaces: Sequence[SearchSpace], genes: Mapping[str, Genes]
) -> list[KernelConfig]:
    """At most MOST_CHANGED configs that can serve the problem and differ from a starting config in a gene or two: for a
    head_dim that no starting config divides."""
    found = (
        other
        for space in spaces
        for config in space.starting_configs()
        for other in neighbours(config, problem, gpu, genes[space.family])
    )
    configs = list({config.id: config for config in found}.values())
    return configs[:: math.ceil(len(configs) / MOST_CHANGED)] if configs else []


def known_genes(spaces: Sequence[SearchSpace], genes: Mapping[str, Genes]) -> dict[str, Genes]:
    """By family: the values of `genes`, and those that a starting config has."""
    return {
        space.family: {
            name: list(
                dict.fromkeys([*genes.get(space.family, {}).get(name, ()), *(row[name] for row in space.starting)])
            )
            for name in space.names()
        }
        for space in spaces
    }
