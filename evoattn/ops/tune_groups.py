"""Which problems `evoattn.tune` searches together, and what part of the time each group of them is due."""

from __future__ import annotations

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.ops import current
from evoattn.ops.choice import Picked
from evoattn.ops.shapes import Asked
from evoattn.portfolio.engine.kernel import Group
from evoattn.portfolio.pick import Pick, portfolio_kernels

ELSEWHERE = frozenset(("flash_wmma", "three_kernel"))
"""Families that have won no measured problem: the time is better spent on the others."""
UNKNOWN_GAIN, LEAST_GAIN = 0.3, 0.01
"""Part of a call's time that a search may save: where nothing that was measured for it runs today, and where a search
has been."""


def _gain(today: Picked | None) -> float:
    """Part of a call's time that a search should save: what the class of a portfolio's pick loses to the best known."""
    if today is None or today.estimated:
        return UNKNOWN_GAIN
    regret = today.expected_regret if isinstance(today, Pick) else None
    return max(LEAST_GAIN, 1 - 1 / regret) if regret else LEAST_GAIN


def groups_of(entries: list[Asked], gpu: GpuSpec) -> list[Group]:
    """The problems by what one kernel serves, each group due its share of calls × time × expected gain."""
    groups: dict[str, Group] = {}
    for entry in entries:
        p = entry.problem
        able = [f for f in registry.FAMILIES if not registry.FAMILIES[f].why_unsupported(p, gpu) and f not in ELSEWHERE]
        if not able or p.lse:
            continue
        dims = f"d{p.head_dim}/{p.value_dim}" if p.value_dim else f"d{p.head_dim}"
        name = " ".join((p.dtype, dims, p.mask, *p.variants))  # what one kernel serves
        group = groups.setdefault(name, Group(name, [], tuple(able), 0.0))
        group.problems.append(p)
        group.families = tuple(dict.fromkeys((*group.families, *able)))
        given = [(c.family, c.params) for c in portfolio_kernels(p, gpu)]
        picked = current.best_known(p, gpu)
        if picked:
            given.insert(0, (picked.family, picked.config.params))
        group.weight += entry.count * (entry.us or 1.0) * _gain(picked)
        group.given += [one for one in given if one not in group.given]
    total = sum(group.weight for group in groups.values())
    for group in groups.values():
        group.weight = max(group.weight / total, 0.02)
    return list(groups.values())
