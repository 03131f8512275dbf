"""A measuring campaign: its groups of problems, which of their kernels are worth a careful comparison, and its file."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evoattn.cost import measurements
from evoattn.engine.groups import Group, Kernel
from evoattn.families import registry
from evoattn.model.gpu import DetectedDevice, GpuError, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import ConfigError, SearchSpace, load_space
from evoattn.portfolio.pick import portfolio_kernels
from evoattn.portfolio.problems import by_group, chosen, group_of

FAMILIES = {"16": ("flash_wgmma", "split_kv", "flash_mma"), "32": ("flash_scalar", "split_kv", "large_head")}
"""By bits. Not: flash_wmma and three_kernel, which have won no problem. Those that serve variants alone come to these
(`families_for`)."""
WIDE, WIDE_FAMILIES = 256, ("large_head_mma",)
"""The families in 16 bits beyond this head_dim: of 14 recorded problems (landscapes.npz) large_head won none, and was
1.5 to 11 times slower."""
RECALLED = "recalled"
"""Origin of a kernel whose times an earlier campaign took."""
MOST_LOST = 4.0
"""A time over the best one counts as no more."""


def plain_families(name: str) -> tuple[str, ...]:
    """The families of a group of plain attention, by the bits and head_dim in its name."""
    bits, dim, *_ = name.split()
    return WIDE_FAMILIES if bits == "16" and int(dim[1:]) > WIDE else FAMILIES[bits]


def families_for(problem: AttentionProblem, gpu: GpuSpec) -> tuple[str, ...]:
    """The families of the problem's bits and head_dim, and those for variants alone that can serve it."""
    special = (f.name for f in registry.FAMILIES.values() if not (f.plain or f.why_unsupported(problem, gpu)))
    return (*plain_families(group_of(problem)), *special)


def make_groups(
    drawn: Iterable[AttentionProblem], earlier: Sequence[Path], gpu: GpuSpec, count: int, emphasis: bool = False
) -> list[Group]:
    """Groups of `count` problems in all that no final table of the `earlier` campaigns has, the first ones drawn, or
    with `emphasis` more of those on which picks lose most. A group has a share of the time by its number of problems,
    and begins at their picks. Times of earlier searches on the card are taken over. Raises `OSError`."""
    loaded = [load(path) for path in earlier]
    timed = {g.problems[i] for _, groups, tables in loaded for g in groups for i in timed_problems(tables.get(g.name))}
    made = []
    for name, problems in sorted(by_group(chosen(drawn, timed, count, emphasis)).items()):
        families = families_for(problems[0], gpu)
        group = Group(name, problems, families, len(problems), given=_given(problems, families, gpu))
        spaces = {family: load_space(family, gpu) for family in families}
        for about, groups, _ in loaded:
            if card(about["device"]) == gpu:
                for other in groups:
                    recall(group, other, spaces)
        made.append(group)
    return made


def _given(
    problems: Sequence[AttentionProblem], families: Collection[str], gpu: GpuSpec
) -> list[tuple[str, dict[str, Any]]]:
    """The two kernels that should take least time on each problem, once."""
    found = {c.id: c for p in problems for c in portfolio_kernels(p, gpu)[:2] if c.family in families}
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
            known = group.kernels.setdefault(kernel.id, Kernel(kernel.family, kernel.params, RECALLED, "right"))
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


def timed_problems(table: dict[str, Any] | None) -> list[int]:
    """Indexes of the problems that a final table of a group has a time of; none where there is no table."""
    return [i for i, row in enumerate(table["us"]) if any(row)] if table else []


def contenders(group: Group, most: int) -> list[Kernel]:
    """The `most` kernels that together leave the least regret on the problems that they were timed on, chosen one by
    one."""
    best = {i: group.best(i) for i in range(len(group.problems))}
    leaders = {k.id: k for i in range(len(group.problems)) for k in group.leaders(i, 4)}
    candidates, picked = list(leaders.values()), list[Kernel]()
    covered = {i: MOST_LOST for i, us in best.items() if us < float("inf")}
    while candidates and len(picked) < most:

        def gain(kernel: Kernel) -> float:
            lost = {i: min(us / best[i], MOST_LOST) for i, us in kernel.times.items() if i in covered}
            return sum(max(0.0, covered[i] - regret) for i, regret in lost.items())

        leader = max(candidates, key=gain)
        if gain(leader) <= 0.0:
            break
        candidates.remove(leader)
        picked.append(leader)
        for i, us in leader.times.items():
            if i in covered:
                covered[i] = min(covered[i], us / best[i])
    return picked


def card(product: str) -> GpuSpec:
    """The row of a card by the name that its driver gave to a campaign. Raises `GpuError` where there is none."""
    spec = DetectedDevice(0, product, (0, 0), "").spec
    if spec is None:
        raise GpuError(f"No card of the table is called {product}.")
    return spec


def shares(groups: list[Group], count: int) -> list[list[Group]]:
    """The groups in `count` lists of about equal weight."""
    lists: list[list[Group]] = [[] for _ in range(count)]
    for group in sorted(groups, key=lambda g: -g.weight):
        min(lists, key=lambda chosen: sum(g.weight for g in chosen)).append(group)
    return lists


def save(path: Path, groups: list[Group], about: dict[str, Any], table: dict[str, Any]) -> None:
    """One JSON line about the campaign, then one per group: problems, kernels with their times, the final table. Of
    recalled kernels only those of the final table: the earlier campaign's file has them. It is put in place whole."""
    part = path.with_name(path.name + ".part")
    with gzip.open(part, "wt", compresslevel=6) as file:
        file.write(json.dumps(about | {"saved": time.strftime("%Y-%m-%d")}) + "\n")
        for group in groups:
            final = set((table.get(group.name) or {}).get("kernels", ()))
            row = {
                "group": group.name,
                "problems": [p.to_dict() for p in group.problems],
                "kernels": [_plain(k) for k in group.kernels.values() if k.origin != RECALLED or k.id in final],
                "final": table.get(group.name),
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    part.replace(path)


def _plain(kernel: Kernel) -> dict[str, Any]:
    times = {str(i): round(us, 3) for i, us in kernel.times.items()}
    return vars(kernel) | {"rough": sorted(kernel.rough), "id": kernel.id, "times": times}


def content(path: Path) -> measurements.Campaign:
    """What `save` wrote, as it stands there. A path as reports/measurements/h100.npz/h100-2026-11-22-a is of a campaign
    among those of a card. Raises `OSError`."""
    if path.parent.suffix == ".npz":
        return measurements.campaign(path.parent, path.name)
    with gzip.open(path, "rt") as file:
        about, *rows = [json.loads(line) for line in file]
    return measurements.Campaign(path.name.removesuffix(".jsonl.gz"), about, rows)


def load(path: Path) -> tuple[dict[str, Any], list[Group], dict[str, Any]]:
    """What `save` wrote: (about, groups, final tables). A path as for `content`, and it raises the same."""
    recorded = content(path)
    about, rows = recorded.about, recorded.groups
    groups, table = [], {}
    for row in rows:
        names: dict[str, str] = {}  # today's, by the recorded ones, which lack parameters that are younger
        group = Group(row["group"], [AttentionProblem(**p) for p in row["problems"]], plain_families(row["group"]))
        for k in row["kernels"]:
            params = registry.completed(k["family"], k["params"])
            kernel = Kernel(k["family"], params, k["origin"], k["state"], k["registers"], k["spill_bytes"])
            kernel.times = {int(i): us for i, us in k["times"].items()}
            kernel.rough = set(k["rough"])
            names[k["id"]] = kernel.id
            group.kernels[kernel.id] = kernel
        groups.append(group)
        if row["final"]:
            table[row["group"]] = row["final"] | {"kernels": [names[name] for name in row["final"]["kernels"]]}
    return about, groups, table
