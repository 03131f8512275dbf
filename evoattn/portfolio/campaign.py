"""A measuring campaign: its problems, in groups that one compiled kernel serves; which of their kernels are worth a
careful comparison; and its file."""

import gzip
import json
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoattn.cost import measurements
from evoattn.engine.groups import Group, Kernel
from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import ConfigError, SearchSpace
from evoattn.portfolio.pick import portfolio_kernels

RECALLED = "recalled"
"""Origin of a kernel whose times an earlier search took."""
MOST_LOST = 4.0
"""A time over the best one counts as no more."""


def families_of(problems: Iterable[AttentionProblem], gpu: GpuSpec) -> tuple[str, ...]:
    """The families that may win one of the problems."""
    return tuple(dict.fromkeys(name for problem in problems for name in registry.contenders(problem, gpu)))


def make_groups(drawn: Iterable[AttentionProblem], gpu: GpuSpec, count: int) -> list[Group]:
    """Groups of the first `count` problems in all that are not too long. A group has a share of the time by its number
    of problems, and begins at their picks."""
    made = []
    for name, problems in sorted(by_group(chosen(drawn, count)).items()):
        families = families_of(problems, gpu)
        made.append(Group(name, problems, families, len(problems), given=given(problems, families, gpu)))
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


def contenders(group: Group, most: int) -> list[Kernel]:
    """The `most` kernels that together leave the least regret on the problems that they were timed on."""
    best = {i: us for i in range(len(group.problems)) if (us := group.best(i)) < math.inf}
    leaders = list({k.id: k for i in best for k in group.leaders(i, 4)}.values())
    lost = [[kernel.times.get(i, math.inf) / us for kernel in leaders] for i, us in best.items()]
    return [leaders[place] for place in covering(np.array(lost), most, MOST_LOST)]


def covering(lost: NDArray[np.float64], most: int, cap: float, least: float = 0.0) -> list[int]:
    """At most so many columns of `lost` [problems, kernels], chosen one by one, each the one that saves most beside
    those before it, more than nothing and `least` at least. A problem loses `cap` at most."""
    lost = np.minimum(lost, cap)
    left, chosen = np.full(len(lost), cap), list[int]()
    while len(chosen) < most and lost.size:
        saved = np.maximum(left[:, None] - lost, 0.0).sum(axis=0)
        best = int(saved.argmax())
        if not saved[best] or saved[best] < least:
            break
        chosen.append(best)
        left = np.minimum(left, lost[:, best])
    return chosen


def save(path: Path, groups: list[Group], about: dict[str, Any], table: dict[str, Any]) -> None:
    """One JSON line about the campaign, then one per group: problems, kernels with their times, the final table. It is
    put in place whole."""
    part = path.with_name(path.name + ".part")
    with gzip.open(part, "wt", compresslevel=6) as file:
        file.write(json.dumps(about | {"saved": time.strftime("%Y-%m-%d")}) + "\n")
        for group in groups:
            row = {
                "group": group.name,
                "problems": [p.to_dict() for p in group.problems],
                "kernels": [_plain(k) for k in group.kernels.values()],
                "final": table.get(group.name),
            }
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    part.replace(path)


def _plain(kernel: Kernel) -> dict[str, Any]:
    plain = {name: getattr(kernel, name) for name in Kernel.__dataclass_fields__}
    times = {str(i): round(us, 3) for i, us in kernel.times.items()}
    return plain | {"rough": sorted(kernel.rough), "id": kernel.id, "times": times}


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


def chosen(drawn: Iterable[AttentionProblem], count: int) -> list[AttentionProblem]:
    """The first `count` different ones of the drawn problems that are not too long."""
    found = (p for p in dict.fromkeys(map(stand_in, drawn)) if p.flops <= MOST_FLOPS.get(bits_of(p), MOST_FLOPS["16"]))
    return list(islice(found, count))
