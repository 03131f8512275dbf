"""Are kernels near a pick that the cost model expects to be faster (`evoattn/portfolio/refine.py`) faster?

    python scripts/portfolio_refined.py --checked CHECK.json --seeds 89,90,91,92,93,94 --count 60 -o OUT.json

For each problem of a check (`scripts/portfolio_check.py -o`): the pick of then and of today, the best that the check's
search found, the class's best by the cost model, and the steps of a climb from both by the cost model, all timed in
turns on the GPU that is here, and what each loses against the fastest of them. --no-device GPU: the configs alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import geometric_mean, quantiles
from typing import Any

from evoattn.cost.cost import scores
from evoattn.families.registry import completed
from evoattn.model.gpu import GpuSpec, detect_devices, lookup
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, load_space
from evoattn.portfolio.campaign import card, families_for
from evoattn.portfolio.draws import PLAIN, draw_all
from evoattn.portfolio.engine.engine import Engine
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.pick import portfolio_kernels
from evoattn.portfolio.refine import LEAST_GAIN, all_genes, climb

ROUNDS = 4


def contestants(problem: AttentionProblem, row: dict[str, Any], gpu: GpuSpec) -> dict[str, tuple[KernelConfig, float]]:
    """By label: a config and its cost."""
    ranked = portfolio_kernels(problem, gpu)
    costs = scores(problem, ranked, gpu)
    best = ranked[costs.index(min(costs))]
    named = {"pick": ranked[0], "class": best}
    for label in ("pick", "winner"):
        if row.get(label):
            named[f"checked {label}"] = KernelConfig(row[label][0], completed(*row[label]))
    found = dict(zip(named, zip(named.values(), scores(problem, list(named.values()), gpu), strict=True), strict=True))
    for label, start in (("pick", ranked[0]), ("class", best)):
        for step, scored in enumerate(
            climb(start, problem, gpu, ROUNDS, all_genes(load_space(start.family, gpu)))[1:], start=1
        ):
            found[f"{label} {step}"] = scored.config, scored.score
    return found


def chosen(kernels: dict[str, Any], start: str, steps: int) -> dict[str, Any]:
    """Where a climb of so many steps ends that begins at the pick, or at the class's best by the cost model where that
    costs less by LEAST_GAIN; the pick where the climb's end does not."""
    pick, enough = kernels["pick"], kernels["pick"]["cost"] * (1 - LEAST_GAIN)
    start = start if kernels[start]["cost"] < enough else "pick"
    ends = [kernels[name] for name in (start, *(f"{start} {step}" for step in range(1, steps + 1))) if name in kernels]
    return ends[-1] if ends[-1]["us"] and ends[-1]["cost"] <= enough else pick


def summary(rows: list[dict[str, Any]]) -> str:
    """A row of a table for each rule: what its choice loses against the fastest of all that were timed."""
    rules = {"the pick": ("pick", 0), "the class's best by the cost model, from 2 %": ("class", 0)}
    rules |= {f"{n} step{'s' * (n > 1)} from the pick": ("pick", n) for n in (1, 2, 3, 4)}
    rules |= {f"{n} step{'s' * (n > 1)} from the class's best": ("class", n) for n in (1, 2, 3, 4)}
    lines = ["| kernel | problems | geomean | 95th percentile | worst |", "|---|---|---|---|---|"]
    timed = [row["kernels"] for row in rows if row["kernels"]["pick"]["us"]]
    least = [min(k["us"] for k in kernels.values() if k["us"]) for kernels in timed]
    for name, rule in rules.items():
        lost = [chosen(kernels, *rule)["us"] / us for kernels, us in zip(timed, least, strict=True)]
        percentile = quantiles(lost, n=20)[-1] if len(lost) > 1 else lost[0]
        lines.append(f"| {name} | {len(lost)} | {geometric_mean(lost):.3f} | {percentile:.3f} | {max(lost):.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checked", type=Path, required=True)
    parser.add_argument("--seeds", required=True)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--no-device", metavar="GPU")
    parser.add_argument("-o", "--output", type=Path, required=True)
    words = parser.parse_args()
    gpu = lookup(words.no_device) if words.no_device else card(detect_devices()[0].product)
    checked = {row["problem"]: row for row in json.loads(words.checked.read_text())["rows"]}
    drawn = draw_all([PLAIN], [int(seed) for seed in words.seeds.split(",")], words.count)
    problems = [p for p in drawn if p.describe() in checked]
    started = time.monotonic()
    found = [contestants(p, checked[p.describe()], gpu) for p in problems]
    print(f"{time.monotonic() - started:.1f} s: {sum(len({c.id for c, _ in f.values()}) for f in found)} configs")
    groups = [Group(f"{i} {p.describe()}", [p], families_for(p, gpu)) for i, p in enumerate(problems)]
    kernels = [{c.id: Kernel(c.family, c.params) for c, _ in f.values()} for f in found]
    rows: list[dict[str, Any]] = []

    def keep(group: Group, times: dict[str, float | None]) -> None:
        named = found[len(rows)].items()
        row = {n: {"config": [c.family, c.params], "cost": cost, "us": times.get(c.id)} for n, (c, cost) in named}
        rows.append({"problem": group.problems[0].describe(), "kernels": row})
        words.output.write_text(json.dumps(rows))

    if words.no_device:
        for group in groups:
            keep(group, {})
        return
    with Engine(groups, gpu, words.jobs, most=1) as engine:
        engine.run(0)
        engine.compile_all([(g, k) for g, of_group in zip(groups, kernels, strict=True) for k in of_group.values()])
        print(f"{time.monotonic() - started:.1f} s: compiled", flush=True)
        for group, of_group in zip(groups, kernels, strict=True):
            times, _, _ = engine.final(group, 0, list(of_group.values()), words.rounds)
            keep(group, dict(zip(of_group, times, strict=True)))
            print(f"{time.monotonic() - started:.1f} s: {group.name}", flush=True)
    print(summary(rows))


if __name__ == "__main__":
    main()
