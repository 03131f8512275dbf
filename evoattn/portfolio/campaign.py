"""A measuring campaign: its groups of problems, which of their kernels are worth a careful comparison, and its file."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evoattn.cost import measurements
from evoattn.families import registry
from evoattn.model.gpu import DetectedDevice, GpuError, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import config_id, load_space
from evoattn.portfolio import cover
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.features import FEW_ROWS
from evoattn.portfolio.strata import by_class, group_of, spread

FAMILIES = {"16": ("flash_wgmma", "split_kv", "flash_mma"), "32": ("flash_scalar", "split_kv", "large_head")}
"""By bits. Not: flash_wmma and three_kernel, which have won no problem. Those that serve variants alone come to these
(`families_for`)."""
WIDE, WIDE_FAMILIES = 256, ("large_head_mma",)
"""The families in 16 bits beyond this head_dim: of 14 recorded problems (docs/landscapes) large_head won none, and was
1.5 to 11 times slower."""
PROBLEMS = {"16 d64": (150, 110), "16": (70, 56), "32": (16, 12), "32 d64": (28, 20)}
PROBLEMS |= {"16 d128": PROBLEMS["16 d64"], "32 d128": PROBLEMS["32 d64"]}
PROBLEMS |= {"16 d512": (30, 30), "16 d384": (14, 14), "16 d320": (14, 14)}
"""Problems of a class, (full, causal), by the longest beginning of its name that fits."""
WEIGHTS = {"16 d64": 3.0, "16 d128": 3.0, "16 d256": 1.5, "16 d96": 1.5, "16": 1.0, "32": 0.4, "32 d64": 0.8}
WEIGHTS |= {"32 d128": WEIGHTS["32 d64"], "16 d512": 3.0, "32 d512": 0.8}
RECALLED = "recalled"
"""Origin of a kernel whose times an earlier campaign took."""
LATE = 4.0
"""A final time that is so many times the search's on the same card is of a call that the CPU was late with: of 2,202
pairs of campaign k five differ by 6 to 205, and all others by less than 2."""
VARIANT_PROBLEMS = 24
"""Of a group of a variant."""


def of_class(table: dict[str, Any], name: str) -> Any:
    return next(table[key] for key in sorted(table, key=len, reverse=True) if name == key or name.startswith(f"{key} "))


def plain_name(name: str) -> str:
    """The group of plain attention that has the mask of the group `name`."""
    return name.partition("+")[0]


def _given_for(name: str, given: dict[str, list[Any]]) -> list[Any]:
    """The configs that a group begins at. A variant without any takes those of groups with a part of its variants, most
    of them first, and its mask or the full one, among which are the kernels for few queries."""
    plain, own = plain_name(name), set(name.split("+"))
    if name in given or name == plain:
        return list(given.get(name, []))
    masks = dict.fromkeys((plain, plain.replace("causal", "full")))
    near = [n for mask in masks for n in given if plain_name(n) == mask and own >= set(n.split("+")[1:])]
    return [g for other in sorted(near, key=lambda other: -other.count("+")) for g in given[other]]


def plain_families(name: str) -> tuple[str, ...]:
    """The families of a group of plain attention, by the bits and head_dim in its name."""
    bits, dim, *_ = name.split()
    return WIDE_FAMILIES if bits == "16" and int(dim[1:]) > WIDE else FAMILIES[bits]


def families_for(problem: AttentionProblem, gpu: GpuSpec) -> tuple[str, ...]:
    """The families of the problem's bits and head_dim, and those for variants alone that can serve it."""
    special = (f.name for f in registry.FAMILIES.values() if not (f.plain or f.why_unsupported(problem, gpu)))
    return (*plain_families(group_of(problem)), *special)


def make_groups(
    drawn: Iterable[AttentionProblem],
    gpu: GpuSpec,
    given: dict[str, list[Any]] | None = None,
    times: float = 1,
    without: Collection[AttentionProblem] = (),
) -> list[Group]:
    """A group per class of the problems drawn. `given`: configs to try first, by class, in place of the starting
    configs. `times` as many problems as usual; those `without` are left out."""
    groups = []
    for name, found in sorted(by_class(drawn).items()):
        plain = plain_name(name)
        count = VARIANT_PROBLEMS if name != plain else of_class(PROBLEMS, name)[name.endswith("causal")]
        problems = [p for p in found if p not in without]
        chosen = spread(problems, round(times * count), gpu) if problems else []
        if not chosen:  # all of them were measured before, or are too long to be
            continue
        families = families_for(chosen[0], gpu)
        group = Group(name, chosen, families, of_class(WEIGHTS, name) if name == plain else 1.0)
        group.given = _given_for(name, given or {})
        special = [f for f in families if not registry.lookup(f).plain]  # genes may be younger than what is given
        starting = special if group.given else families
        group.given += [(f, params) for f in starting for params in load_space(f, gpu).starting]
        groups.append(group)
    return groups


def leaders(group: Group, each: int) -> list[Kernel]:
    """The `each` fastest kernels of every problem, each kernel once."""
    found = {k.id: k for i in range(len(group.problems)) for k in group.leaders(i, each)}
    return list(found.values())


def contenders(group: Group, most: int) -> list[Kernel]:
    """The `most` kernels that together leave the least regret on the problems that they were timed on, chosen one by
    one."""
    right = [k for k in group.kernels.values() if k.state == "right" and k.times]
    best = {i: group.best(i) for i in range(len(group.problems))}
    candidates = leaders(group, 4)
    chosen: list[Kernel] = []
    covered = {i: 4.0 for i, us in best.items() if us < float("inf")}
    while candidates and len(chosen) < most and right:

        def gain(kernel: Kernel) -> float:
            return sum(max(0.0, covered[i] - min(us / best[i], 4.0)) for i, us in kernel.times.items() if i in covered)

        leader = max(candidates, key=gain)
        if gain(leader) <= 0.0:
            break
        candidates.remove(leader)
        chosen.append(leader)
        for i, us in leader.times.items():
            if i in covered:
                covered[i] = min(covered[i], us / best[i])
    return chosen


def covering(group: Group, table: dict[str, Any], most: int) -> list[Kernel]:
    """Of a final table's problems of few and of many rows at most `most` compiled sources each, of which the fastest on
    each problem leaves the least regret; of each source one kernel."""
    us = np.array([[time or np.nan for time in row] for row in table["us"]], dtype=float)
    few = [p.group_size * p.seqlen_q <= FEW_ROWS for p in group.problems]
    units: dict[str, list[int]] = {}
    for column, name in enumerate(table["kernels"]):
        units.setdefault(source_of(group.kernels[name]), []).append(column)
    columns = list(units.values())
    found: dict[str, Kernel] = {}
    for size in (True, False):
        rows = us[[i for i, other in enumerate(few) if other == size and not np.isnan(us[i]).all()]]
        if len(rows):
            chosen = [table["kernels"][columns[u][0]] for u in cover.choose(rows, rows, columns, most)]
            found |= {k: group.kernels[k] for k in chosen}
    return list(found.values())


def card(product: str) -> GpuSpec:
    """The row of a card by the name that its driver gave to a campaign. Raises `GpuError` where there is none."""
    spec = DetectedDevice(0, product, (0, 0), "").spec
    if spec is None:
        raise GpuError(f"No card of the table is called {product}.")
    return spec


@dataclass(frozen=True)
class Part:
    """A group's final table as one campaign measured it on one card."""

    group: Group
    table: dict[str, Any]
    gpu: GpuSpec


def steady(us: float, kernel: Kernel, index: int) -> float:
    """A kernel's time in a final table, or the search's of the same problem, by its index, where that is much less."""
    searched = us if index in kernel.rough else kernel.times.get(index, us)
    return searched if us > LATE * searched else us


def merged(parts: list[Part]) -> tuple[Group, dict[str, Any], list[GpuSpec]]:
    """One group and final table of several campaigns' problems and kernels, and the card of each of its rows. Of a
    problem that several have timed on one card the last counts."""
    rows: dict[tuple[GpuSpec, AttentionProblem], dict[str, float]] = {}
    kernels: dict[str, Kernel] = {}
    for part in parts:
        own = {name: part.group.kernels[name] for name in part.table["kernels"]}
        kernels |= own
        for index, (problem, times) in enumerate(zip(part.group.problems, part.table["us"], strict=True)):
            timed = {name: steady(us, k, index) for (name, k), us in zip(own.items(), times, strict=True) if us}
            if timed or (part.gpu, problem) not in rows:
                rows[part.gpu, problem] = timed
    first = parts[0].group
    group = Group(first.name, [problem for _, problem in rows], first.families, kernels=kernels)
    us = [[row.get(name) for name in kernels] for row in rows.values()]
    return group, {"kernels": list(kernels), "us": us}, [gpu for gpu, _ in rows]


def shares(groups: list[Group], count: int) -> list[list[Group]]:
    """The groups in `count` lists of about equal weight."""
    lists: list[list[Group]] = [[] for _ in range(count)]
    for group in sorted(groups, key=lambda g: -g.weight):
        min(lists, key=lambda chosen: sum(g.weight for g in chosen)).append(group)
    return lists


def source_of(kernel: Kernel) -> str:
    """What tells kernels of one compiled source: SPLITS without a cluster is an argument of the launch."""
    params = kernel.params
    if "SPLITS" in params and params.get("MERGE") != "cluster":
        params = params | {"SPLITS": 0}
    return config_id(kernel.family, params)


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


def load(path: Path) -> tuple[dict[str, Any], list[Group], dict[str, Any]]:
    """What `save` wrote: (about, groups, final tables). A path as reports/measurements/h100.npz/h100-2026-11-22-a is of
    a campaign among those of a card."""
    if path.parent.suffix == ".npz":
        recorded = measurements.campaign(path.parent, path.name)
        about, rows = recorded.about, recorded.groups
    else:
        with gzip.open(path, "rt") as file:
            about, *rows = [json.loads(line) for line in file]
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
