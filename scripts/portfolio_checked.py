"""Add what `evoattn portfolio check` timed to a card's file of measured times; needs no GPU.

    python scripts/portfolio_checked.py CARD.npz NAME CHECK.json… --problem mla_decode [--problem B=8,H=128,…]
    python scripts/portfolio_checked.py CARD.npz NAME CHECK.json… --drawn

`CHECK.json` is what `evoattn portfolio check -o` wrote: of each problem named, or with --drawn of all that were drawn
of its seeds, the pick's and the winner's times are kept as the campaign NAME, both measured in turns. A problem of
several checks gets the kernels of all of them where a kernel that they share shows that the GPU ran alike; else the
file is refused. Registers come from a compile.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from evoattn.backends.compiler import compile_candidate
from evoattn.cost import measurements
from evoattn.cost.measurements import Campaign
from evoattn.families import registry
from evoattn.families.render import render
from evoattn.model.gpu import GpuSpec
from evoattn.model.named_problems import by_name_or_shape
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio.campaign import card, group_of
from evoattn.portfolio.workload import PLAIN, draw_all

ALIKE = 1.02
"""Times of one kernel in two checks differ by no more where the checks are taken together."""
Times = dict[AttentionProblem, dict[str, float]]


def times_of(checks: list[dict[str, Any]], problems: list[AttentionProblem]) -> tuple[Times, dict[str, KernelConfig]]:
    """µs by problem and kernel, and the kernels by name. Raises `ValueError` where two checks of a problem share no
    kernel, or one whose times differ by more than ALIKE."""
    named = {p.describe(): p.with_(name="") for p in problems}
    times: Times = {}
    kernels: dict[str, KernelConfig] = {}
    for check in checks:
        for row in check["rows"]:
            if (problem := named.get(row["problem"])) is None or row["wrong"]:
                continue
            found = {}
            for (family, params), us in ((row["pick"], row["pick_us"]), (row["winner"], row["best_us"])):
                kernel = KernelConfig(family, registry.completed(family, params))
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


def groups_of(times: Times, kernels: dict[str, KernelConfig], gpu: GpuSpec) -> list[dict[str, Any]]:
    """Groups of problems with their kernels and final tables, as `measurements.Campaign` has them. Raises
    `CompileError`."""
    groups = []
    for name in sorted({group_of(p) for p in times}):
        problems = [p for p in times if group_of(p) == name]
        own = list(dict.fromkeys(k for p in problems for k in times[p]))
        rows = [
            _compiled(kernels[k], next(p for p in problems if k in times[p]), gpu)
            | {"times": {str(i): times[p][k] for i, p in enumerate(problems) if k in times[p]}, "rough": []}
            for k in own
        ]
        final = {"kernels": own, "us": [[times[p].get(k) for k in own] for p in problems]}
        groups.append({"group": name, "problems": [p.to_dict() for p in problems], "kernels": rows, "final": final})
    return groups


def _compiled(config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> dict[str, Any]:
    """What a campaign says of a kernel, with the compiler's registers and spills."""
    info = compile_candidate(render(registry.lookup(config.family), problem, config, gpu)).info
    return {
        "id": config.id, "family": config.family, "params": config.params, "origin": "given", "state": "right",
        "registers": info.registers, "spill_bytes": info.spill_store_bytes + info.spill_load_bytes,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("card", type=Path, help="the file of the card")
    parser.add_argument("name", help="of the campaign")
    parser.add_argument("checks", type=Path, nargs="+")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--problem", action="append", default=[], help="a name or a shape; may be repeated")
    which.add_argument("--drawn", action="store_true", help="all that were drawn of the checks' seeds")
    parser.add_argument("--versions", default="", help="of what timed the checks, for people")
    options = parser.parse_args()
    checks = [json.loads(path.read_text()) for path in options.checks]
    devices = sorted({check["device"] for check in checks})
    if len(devices) > 1:
        parser.error(f"checks of several cards: {', '.join(devices)}")
    named = [by_name_or_shape(text) for text in options.problem]
    times, kernels = times_of(checks, named or [p for check in checks for p in drawn_problems(check)])
    measured = sum(len(row) for row in times.values())
    about = {
        "device": devices[0], "versions": options.versions, "source": [path.name for path in options.checks],
        "measured": measured, "compiled": len(kernels), "saved": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    measurements.append(options.card, [Campaign(options.name, about, groups_of(times, kernels, card(devices[0])))])
    print(f"{measured} times of {len(kernels)} kernels on {len(times)} problems: {options.name} of {options.card}")


if __name__ == "__main__":
    main()
