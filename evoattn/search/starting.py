"""Where a search begins: at what was kept and a portfolio's kernels for the problem, then at known-good configs."""

from dataclasses import replace

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import ConfigError, KernelConfig, SearchSpace
from evoattn.portfolio.climb import Costs
from evoattn.portfolio.pick import portfolio_kernels
from evoattn.portfolio.wins import Wins

MOST = 8
"""Configs of the portfolio that a search begins with, those first that should take least time."""
MOST_OF_A_FAMILY = 6
"""Of its known-good configs."""


def starting_configs(space: SearchSpace, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """Of the family's known-good configs those that are valid for the problem, those first that should take least time
    by the cost model."""
    family = registry.lookup(space.family)
    valid = [c for c in space.starting_configs() if family.why_invalid(problem, c, gpu) is None]
    return [one.config for one in sorted(Costs(problem, gpu).of(valid), key=lambda one: one.score)]


def begin(spaces: dict[str, SearchSpace], problem: AttentionProblem, gpu: GpuSpec) -> dict[str, SearchSpace]:
    """The spaces with the configs as `starting` that a search of the problem begins with: what an earlier search kept
    for it, then the portfolio's kernels, then known-good ones. Families of the first two come first.

    A kernel of the portfolio that is redundant on this very problem, or none of today's space, is passed over."""
    rows: dict[str, list[KernelConfig]] = {}
    kept = Wins().find(problem.canonical(), gpu)
    for config in (*([kept.config] if kept else []), *portfolio_kernels(problem, gpu)):
        space = spaces.get(config.family)
        if space is None or sum(map(len, rows.values())) >= MOST:
            continue
        if registry.lookup(config.family).why_invalid(problem, config, gpu):
            continue
        try:
            row = rows.setdefault(config.family, [])
            row += [made for made in (space.make_config(config.params),) if made not in row]
        except ConfigError:
            continue
    chosen = {}
    for name in (*rows, *(name for name in spaces if name not in rows)):
        known = starting_configs(spaces[name], problem, gpu)[:MOST_OF_A_FAMILY]
        configs = {c.id: c for c in (*rows.get(name, ()), *known)}
        chosen[name] = replace(spaces[name], starting=tuple(c.params for c in configs.values()))
    return chosen
