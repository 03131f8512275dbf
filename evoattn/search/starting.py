"""Where a search begins: at the kernels that a portfolio has for the problem, before the configs of the YAML files."""

from __future__ import annotations

from dataclasses import replace

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import ConfigError, SearchSpace
from evoattn.portfolio.pick import portfolio_kernels

MOST = 8
"""Configs of the portfolio that a search begins with, those first that should take least time."""


def from_portfolio(spaces: dict[str, SearchSpace], problem: AttentionProblem, gpu: GpuSpec) -> dict[str, SearchSpace]:
    """The spaces with the portfolio's kernels as their first starting configs; families that have one come first.

    A config that is redundant on this very problem, or none of today's space, is passed over.
    """
    rows: dict[str, list[dict[str, object]]] = {}
    for config in portfolio_kernels(problem, gpu):
        space = spaces.get(config.family)
        if space is None or sum(map(len, rows.values())) >= MOST:
            continue
        if registry.lookup(config.family).why_invalid(problem, config, gpu):
            continue
        try:
            space.make_config(config.params)
        except ConfigError:
            continue
        rows.setdefault(config.family, []).append({"config": config.params})
    begun = {name: replace(spaces[name], starting=(*made, *spaces[name].starting)) for name, made in rows.items()}
    return begun | {name: space for name, space in spaces.items() if name not in begun}
