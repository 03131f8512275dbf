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
    """`start`, then after each round the neighbour of least cost, for as long as the cost falls."""
    found = [Scored(start, scores(problem, [start], gpu)[0])]
    for _ in range(rounds):
        near = neighbours(found[-1].config, problem, gpu)
        costs = scores(problem, near, gpu) if near else []
        if not costs or min(costs) >= found[-1].score:
            break
        found.append(Scored(near[costs.index(min(costs))], min(costs)))
    return found
