"""A campaign of what `evoattn portfolio check` timed; needs no GPU.

    python scripts/portfolio_checked.py OUT.jsonl.gz CHECK.json… --problem mla_decode [--problem B=8,H=128,…]
    python scripts/portfolio_checked.py OUT.jsonl.gz CHECK.json… --drawn

`CHECK.json` is what `evoattn portfolio check -o` wrote: of each problem named, or with --drawn of all that were drawn
of its seeds, the pick's and the winner's times are kept, both measured in turns. A problem of several checks gets the
kernels of all of them where a kernel that they share shows that the GPU ran alike; else the file is refused. Registers
come from a compile.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from evoattn.backends.compiler import compile_candidate
from evoattn.engine.groups import Group, Kernel
from evoattn.families import registry
from evoattn.families.render import render
from evoattn.model.gpu import GpuSpec
from evoattn.model.named_problems import by_name_or_shape
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio import campaign
from evoattn.portfolio.problems import group_of
from evoattn.portfolio.workload import PLAIN, draw_all

ALIKE = 1.02
"""Times of one kernel in two checks differ by no more where the checks are taken together."""
Times = dict[AttentionProblem, dict[str, float]]


def times_of(checks: list[dict[str, Any]], problems: list[AttentionProblem]) -> tuple[Times, dict[str, Kernel]]:
    """µs by problem and kernel, and the kernels by name. Raises `ValueError` where two checks of a problem share no
    kernel, or one whose times differ by more than ALIKE."""
    named = {p.describe(): p.with_(name="") for p in problems}
    times: Times = {}
    kernels: dict[str, Kernel] = {}
    for check in checks:
        for row in check["rows"]:
            if (problem := named.get(row["problem"])) is None or row["wrong"]:
                continue
            found = {}
            for (family, params), us in ((row["pick"], row["pick_us"]), (row["winner"], row["best_us"])):
                kernel = Kernel(family, registry.completed(family, params), "given", "right")
                kernels[kernel.id] = kernel
                found[kernel.id] = us
            known = times.setdefault(problem, {})
            ratios = [found[name] / known[name] for name in found.keys() & known.keys()]
            if known and not any(1 / ALIKE <= ratio <= ALIKE for ratio in ratios):
                raise ValueError(f"{row['problem']}: the checks cannot be taken together")
            times[problem] = known | found
    return times, kernels


def drawn_problems(check: dict[str, Any]) -> list[AttentionProblem]:
    """The plain problems of a check, drawn of its seeds again."""
    return draw_all([PLAIN], check["seeds"], len(check["rows"]))


def groups_of(times: Times, kernels: dict[str, Kernel]) -> tuple[list[Group], dict[str, Any]]:
    """Groups and their final tables, as a campaign's file has them."""
    groups, table = [], {}
    for name in sorted({group_of(p) for p in times}):
        problems = [p for p in times if group_of(p) == name]
        own = list(dict.fromkeys(k for p in problems for k in times[p]))
        group = Group(name, problems, (), kernels={k: replace(kernels[k]) for k in own})  # others have them too
        for k in own:
            group.kernels[k].times = {i: times[p][k] for i, p in enumerate(problems) if k in times[p]}
        groups.append(group)
        table[name] = {"kernels": own, "us": [[times[p].get(k) for k in own] for p in problems]}
    return groups, table


def compiled(kernel: Kernel, problem: AttentionProblem, gpu: GpuSpec) -> None:
    """Sets the kernel's registers and spills. Raises `CompileError`."""
    family, config = registry.lookup(kernel.family), KernelConfig(kernel.family, kernel.params)
    info = compile_candidate(render(family, problem, config, gpu)).info
    kernel.registers, kernel.spill_bytes = info.registers, info.spill_store_bytes + info.spill_load_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("checks", type=Path, nargs="+")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--problem", action="append", default=[], help="a name or a shape; may be repeated")
    which.add_argument("--drawn", action="store_true", help="all that were drawn of the checks' seeds")
    parser.add_argument("--versions", default="", help="of what timed the checks, for people")
    words = parser.parse_args()
    checks = [json.loads(path.read_text()) for path in words.checks]
    devices = sorted({check["device"] for check in checks})
    if len(devices) > 1:
        parser.error(f"checks of several cards: {', '.join(devices)}")
    named = [by_name_or_shape(text) for text in words.problem]
    times, kernels = times_of(checks, named or [p for check in checks for p in drawn_problems(check)])
    groups, table = groups_of(times, kernels)
    for group in groups:
        for kernel in group.kernels.values():
            compiled(kernel, group.problems[min(kernel.times)], campaign.card(devices[0]))
    measured = sum(len(row) for row in times.values())
    about = {"device": devices[0], "versions": words.versions, "source": [path.name for path in words.checks]}
    campaign.save(words.output, groups, about | {"measured": measured, "compiled": len(kernels)}, table)
    print(f"{measured} times of {len(kernels)} kernels on {len(times)} problems: {words.output}")


if __name__ == "__main__":
    main()
