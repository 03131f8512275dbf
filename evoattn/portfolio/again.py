"""A campaign that goes on where earlier ones ended: of each class a few problems that no final table has, the times
that earlier searches took on them, and the shipped kernels to begin with."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from evoattn.families.registry import completed
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import ConfigError, SearchSpace, load_space
from evoattn.portfolio import campaign, shipped
from evoattn.portfolio.emphasis import emphasized
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.final_table import timed_problems
from evoattn.portfolio.pick import portfolio_kernels
from evoattn.portfolio.strata import FP16, MOST_FLOPS, by_class, canonical, of_each_class

Params = dict[str, Any]
OF_EACH_CLASS = {"16 d64": 6, "16 d128": 6, "16 d256": 4, "16 d96": 4, "16": 3, "32 d64": 2, "32 d128": 2, "32": 1}
"""Problems, by the longest beginning of the class's name that fits."""


def shipped_kernels(portfolio: shipped.Portfolio, name: str) -> list[Kernel]:
    """The kernels of a group of a portfolio."""
    rows = json.loads(portfolio.lines[name])["kernels"] if name in portfolio.lines else []
    return [Kernel(row["family"], completed(row["family"], row["params"]), "given") for row in rows]


def groups_again(
    drawn: Iterable[AttentionProblem], earlier: Sequence[Path], gpu: GpuSpec, count: int = 0, emphasis: bool = False
) -> tuple[list[Group], dict[str, list[Kernel]]]:
    """The groups, and the shipped kernels of each. Problems come first that an earlier campaign searched and did not
    time in its final table. In 32 bits those that it did time may come again, as its tables lack a family.

    With a `count` there are so many problems in all, the first ones drawn: of each class as many as come, or with
    `emphasis` more of those on which picks lose most (`evoattn/portfolio/emphasis.py`). They keep their dtype, and fp16
    has groups of its own. A group has a share of the time by its number of problems, and begins at their picks
    alone."""
    loaded = [campaign.load(path) for path in earlier]
    left: list[AttentionProblem] = []
    timed: set[AttentionProblem] = set()
    for _, groups, tables in loaded:
        left += [p for group in groups for p in group.problems]
        timed |= {g.problems[i] for g in groups if tables.get(g.name) for i in timed_problems(tables[g.name])}
    portfolio = shipped.load(gpu.arch)
    made: list[Group] = []
    best: dict[str, list[Kernel]] = {}
    chosen = by_class(_first(drawn, timed, count, emphasis), dtypes=True) if count else by_class([*left, *drawn])
    for name, found in sorted(chosen.items()):
        if name != campaign.plain_name(name):
            continue
        free = [p for p in found if p.dtype == "fp32" or p not in timed]
        problems = free if count else of_each_class(free, campaign.of_class(OF_EACH_CLASS, name))
        families = campaign.plain_families(name)
        weight = len(problems) if count else campaign.of_class(campaign.WEIGHTS, name)
        group = Group(name, problems, families, weight)
        best[name] = shipped_kernels(portfolio, name.removesuffix(FP16)) if portfolio else []
        spaces = {family: load_space(family, gpu) for family in families}
        if count:
            group.given = _picks(problems, gpu)
        else:
            starting = [(family, params) for family, space in spaces.items() for params in space.starting]
            group.given = [(k.family, k.params) for k in best[name]] + starting
        for about, groups, _ in loaded:
            if campaign.card(about["device"]) == gpu:
                for other in groups:
                    recall(group, other, spaces)
        made.append(group)
    return made, best


def _first(
    drawn: Iterable[AttentionProblem], timed: Collection[AttentionProblem], count: int, emphasis: bool
) -> list[AttentionProblem]:
    """The first `count` problems that are not `timed` and not too long, or of each kind its part."""
    found = dict.fromkeys(canonical(problem, dtypes=True) for problem in drawn)
    able = (p for p in found if p not in timed and p.flops <= MOST_FLOPS["32" if p.dtype == "fp32" else "16"])
    return emphasized(able, count) if emphasis else list(islice(able, count))


def _picks(problems: Sequence[AttentionProblem], gpu: GpuSpec) -> list[tuple[str, Params]]:
    """The two kernels that should take least time on each problem, once."""
    found = {c.id: c for p in problems for c in portfolio_kernels(p, gpu)[:2]}
    return [(config.family, config.params) for config in found.values()]


def recall(group: Group, other: Group, spaces: Mapping[str, SearchSpace]) -> None:
    """Take over the kernels of an earlier group of the same name with their times on problems that both have, as far as
    the families' `spaces` of today have them."""
    if other.name != group.name:
        return
    index = {problem: i for i, problem in enumerate(group.problems)}
    there = {i: index[p] for i, p in enumerate(other.problems) if p in index}
    for kernel in other.kernels.values():
        times = {there[i]: us for i, us in kernel.times.items() if i in there}
        if kernel.state == "right" and times and in_space(kernel, spaces):
            known = group.kernels.setdefault(
                kernel.id, Kernel(kernel.family, kernel.params, campaign.RECALLED, "right")
            )
            known.registers, known.spill_bytes = kernel.registers, kernel.spill_bytes
            known.times |= times
            known.rough = (known.rough - set(times)) | {there[i] for i in kernel.rough if i in there}


def in_space(kernel: Kernel, spaces: Mapping[str, SearchSpace]) -> bool:
    """Whether the kernel's config is a point of one of the spaces."""
    try:
        spaces[kernel.family].make_config(kernel.params)
    except (KeyError, ConfigError):
        return False
    return True
