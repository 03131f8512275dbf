"""A measuring campaign: its problems, in groups that one compiled kernel serves, of which kinds on which picks have
lost most come more often than they are drawn; which of their kernels are worth a careful comparison; and its file."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from evoattn.cost import measurements
from evoattn.engine.alike import row_tiles
from evoattn.engine.groups import Group, Kernel
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.gpu import DetectedDevice, GpuError, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import ConfigError, SearchSpace
from evoattn.portfolio.pick import portfolio_kernels

RECALLED = "recalled"
"""Origin of a kernel whose times an earlier campaign took."""
MOST_LOST = 4.0
"""A time over the best one counts as no more."""


def families_of(problems: Iterable[AttentionProblem], gpu: GpuSpec) -> tuple[str, ...]:
    """The families that may win one of the problems."""
    return tuple(dict.fromkeys(name for problem in problems for name in registry.contenders(problem, gpu)))


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
        families = families_of(problems, gpu)
        group = Group(name, problems, families, len(problems), given=given(problems, families, gpu))
        spaces = {family: load_space(family, gpu) for family in families}
        for about, groups, _ in loaded:
            if card(about["device"]) == gpu:
                for other in groups:
                    recall(group, other, spaces)
        made.append(group)
    return made


def given(
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


def load(path: Path) -> tuple[dict[str, Any], list[Group], dict[str, Any]]:
    """What `save` wrote: (about, groups, final tables). A path and errors as of `measurements.recorded`."""
    recorded = measurements.recorded(path)
    about, rows = recorded.about, recorded.groups
    groups, table = [], {}
    for row in rows:
        names: dict[str, str] = {}  # today's, by the recorded ones, which lack parameters that are younger
        families = tuple(dict.fromkeys(k["family"] for k in row["kernels"]))
        group = Group(row["group"], [AttentionProblem(**p) for p in row["problems"]], families)
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


MOST_FLOPS = {"16": 1.2e12, "32": 1.2e11}
"""Per problem, by bits: larger ones are many waves of the same tiles, and take the time of a hundred others."""
FP16 = " fp16"
"""End of the name of a group that has problems of fp16 alone."""
FEW_ROWS, WAVE_TILES = 128, 132
"""Query rows that share a K/V head up to which reading K and V is what takes time; tiles up to which all run at once on
an H100 or H200."""
BRIEF_US = 20.0
LAUNCH_US, BYTES_PER_US, FLOPS_PER_US = 3.0, 2.2e6, 4e8
"""Of an H100's fast kernels, roughly: with these 24 of the 25 problems of a check that took less than BRIEF_US are
brief, and none of the others."""
CACHE_BYTES = 20 << 20
"""K and V of so many bytes and more take longer to read than a launch does, from L2 (50 MB on an H100) or memory."""
FP32_FLOPS = 2e10
"""Of a problem in fp32 of that kind: at most about a ms. Longer ones take the time of many others."""


def bits_of(problem: AttentionProblem) -> str:
    """`32`, `16` or `8`, of Q: fp16 and bf16 share their kernels, the same instructions at the same rates."""
    return str(8 * problem.element_bytes)


def group_of(problem: AttentionProblem) -> str:
    """What one compiled kernel can serve: bits, head_dim, mask and variants, e.g. `16 d64 causal+window+sink`,
    `16 d192 causal+dv128`."""
    words = (f"dv{problem.value_dim}" if name == "value_dim" else name for name in problem.compiled_variants)
    mask = "+".join(("causal" if problem.causal else "full", *words))
    return f"{bits_of(problem)} d{problem.head_dim} {mask}"


def stand_in(problem: AttentionProblem) -> AttentionProblem:
    """The problem with the causal mask that all lengths have, if it has a causal one."""
    return problem.with_(mask="full" if problem.mask == "full" else "causal_lower_right")


def by_group(problems: Iterable[AttentionProblem]) -> dict[str, list[AttentionProblem]]:
    """Different problems by the name of their group, in the order drawn; those of fp16 have groups of their own."""
    groups: dict[str, dict[AttentionProblem, None]] = {}
    for problem in problems:
        name = group_of(problem) + (FP16 if problem.dtype == "fp16" else "")
        groups.setdefault(name, {})[stand_in(problem)] = None
    return {name: list(rows) for name, rows in groups.items()}


def brief(problem: AttentionProblem) -> bool:
    """Whether it should take less than some 20 µs on an H100."""
    return LAUNCH_US + max(problem.bytes / BYTES_PER_US, problem.flops / FLOPS_PER_US) < BRIEF_US


def _few(problem: AttentionProblem) -> bool:
    return problem.group_size * problem.seqlen_q <= FEW_ROWS


def _large_cache(problem: AttentionProblem) -> bool:
    keys = problem.batch * problem.kv_heads * problem.seqlen_k
    return keys * (problem.head_dim + problem.head_dim_v) * problem.element_bytes >= CACHE_BYTES


def _one_wave(problem: AttentionProblem) -> bool:
    return row_tiles(problem) * problem.heads <= WAVE_TILES


EMPHASIS: dict[str, tuple[float, Callable[[AttentionProblem], bool]]] = {
    "fp32": (0.07, lambda p: p.dtype == "fp32" and p.flops <= FP32_FLOPS),
    "few rows, large cache": (0.13, lambda p: _few(p) and _large_cache(p)),
    "few rows": (0.15, _few),
    "causal, one wave": (0.18, lambda p: p.causal and _one_wave(p)),
    "brief, few keys": (0.10, lambda p: p.seqlen_k <= 200 and brief(p)),
    "brief": (0.12, brief),
    "others": (0.25, lambda p: True),
}
"""By name: the part of the problems, and which are of the kind, if of none before it. Of 600 that were measured on an
H100 (campaign w) the cost model's first choice lost 1.093 in fp32, 1.046 on causal ones of one wave of tiles, 1.040 on
brief ones of few keys, 1.037 on few rows and a large cache, 1.031 on other brief ones, 1.029 on other few rows and
1.022 on the others."""


def emphasis_of(problem: AttentionProblem) -> str:
    """The first of EMPHASIS that the problem is of."""
    return next(name for name, (_, of_kind) in EMPHASIS.items() if of_kind(problem))


def emphasized(drawn: Iterable[AttentionProblem], count: int) -> list[AttentionProblem]:
    """`count` of the problems, of each kind its part, the first ones drawn; fewer where fewer are drawn."""
    left = {name: round(part * count) for name, (part, _) in EMPHASIS.items()}
    found = []
    for problem in drawn:
        if left[name := emphasis_of(problem)]:
            left[name] -= 1
            found.append(problem)
    return found


def chosen(
    drawn: Iterable[AttentionProblem], timed: Iterable[AttentionProblem], count: int, emphasis: bool
) -> list[AttentionProblem]:
    """The first `count` of the drawn problems that are not `timed` and not too long, or with `emphasis` of each kind
    its part."""
    known = set(timed)
    found = (
        p
        for p in dict.fromkeys(map(stand_in, drawn))
        if p not in known and p.flops <= MOST_FLOPS.get(bits_of(p), MOST_FLOPS["16"])
    )
    return emphasized(found, count) if emphasis else list(islice(found, count))
