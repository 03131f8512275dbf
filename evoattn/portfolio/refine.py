"""Kernels near one of a portfolio that the cost model expects to be faster on a problem: tiles that fit its lengths,
stages, schedules and so on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from evoattn.cost.cost import scores
from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, SearchSpace, Value, load_space

TOGETHER = (("BLOCK_N", "STAGES"), ("BLOCK_M", "BLOCKS_PER_SM"), ("BLOCK_N", "WARPS"), ("GROUP_ROWS", "BLOCK_M"))
"""Genes that are changed both at once, too: what one takes of shared memory or registers the other must leave."""

SAME = 0.001
"""Costs that differ by no more are the same."""


@dataclass(frozen=True)
class Scored:
    """A config and its cost on the problem (`evoattn.cost.cost.scores`)."""

    config: KernelConfig
    score: float


def neighbours(config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """The valid configs that differ from `config` in one gene, or in two of TOGETHER. If something of `config` is
    redundant on the problem, it may be of the others."""
    family, space = registry.lookup(config.family), load_space(config.family, gpu)
    why_not = family.why_impossible if family.why_invalid(problem, config, gpu) else family.why_invalid
    found = (KernelConfig(config.family, config.params | genes) for genes in _changes(config, space))
    return [other for other in found if not why_not(problem, other, gpu)]


def _changes(config: KernelConfig, space: SearchSpace) -> Iterator[dict[str, Value]]:
    values = {p.name: [v for v in p.values if v != config[p.name]] for p in space.parameters}
    for name, others in values.items():
        yield from ({name: value} for value in others)
    for names in TOGETHER:
        if all(name in values for name in names):
            yield from (dict(zip(names, both, strict=True)) for both in product(*(values[name] for name in names)))


def climb(start: KernelConfig, problem: AttentionProblem, gpu: GpuSpec, rounds: int) -> list[Scored]:
    """`start`, then after each round the neighbour of least cost, for as long as the cost falls. If something of
    `start` is redundant, a neighbour of which nothing is comes before the rounds, if one costs no more."""
    found = [Scored(start, scores(problem, [start], gpu)[0])]
    family = registry.lookup(start.family)
    if family.why_invalid(problem, start, gpu):
        near = [c for c in neighbours(start, problem, gpu) if not family.why_invalid(problem, c, gpu)]
        _step(found, near, problem, gpu, found[0].score * (1 + SAME))
    for _ in range(rounds):
        if not _step(found, neighbours(found[-1].config, problem, gpu), problem, gpu, found[-1].score):
            break
    return found


def _step(found: list[Scored], near: list[KernelConfig], problem: AttentionProblem, gpu: GpuSpec, under: float) -> bool:
    """Whether one of the configs costs less than `under`; the one of least cost is added then."""
    costs = scores(problem, near, gpu) if near else []
    if not costs or min(costs) >= under:
        return False
    found.append(Scored(near[costs.index(min(costs))], min(costs)))
    return True
