"""Make a card's portfolio from campaigns that were measured on it; needs no GPU.

    python scripts/portfolio_build.py h100 CAMPAIGN.jsonl.gz [-o evoattn/portfolio/data/h100.json] [--tune]

Of each class the kernels are chosen one by one so that the rule, asked about every problem with that problem left out, loses least
(`evoattn/portfolio/cover.py`). Prints each class's regret. --tune looks for better weights of the features and prints them.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from evoattn.model.gpu import lookup
from evoattn.portfolio import campaign, rule
from evoattn.portfolio.cover import Judged, choose, judge
from evoattn.portfolio.features import features
from evoattn.portfolio.shipped import DATA, PROBLEM_FIELDS

STEPS = (0.5, 0.7, 1.4, 2.0)


def slowdowns_of(table: dict[str, Any]) -> list[list[float | None]]:
    """Each kernel's time over the best of its problem, both out of the final table."""
    rows = []
    for times in table["us"]:
        best = min(us for us in times if us)
        rows.append([round(us / best, 4) if us else None for us in times])
    return rows


def tune(classes: dict[str, Any]) -> None:
    """Change one weight at a time while the mean objective over all classes falls; prints the weights."""

    def objective() -> float:
        return fmean(judge(c["features"], c["chosen"]).objective for c in classes.values())

    best = objective()
    improved = True
    while improved:
        improved = False
        for name in rule.SCALES:
            for step in STEPS:
                old = rule.SCALES[name]
                rule.SCALES[name] = old * step
                if (now := objective()) < best - 1e-5:
                    best, improved = now, True
                else:
                    rule.SCALES[name] = old
    print("SCALES", {name: round(value, 3) for name, value in rule.SCALES.items()}, "objective", round(best, 5))


def build(groups: list, tables: dict[str, Any], gpu: str, wanted_tune: bool) -> dict[str, Any]:
    """The `classes` of the portfolio's file."""
    spec, made = lookup(gpu), {}
    for group in groups:
        table = tables.get(group.name)
        rows = [i for i, times in enumerate(table["us"]) if any(times)] if table else []
        if not rows:
            continue
        kernels = [group.kernels[k] for k in table["kernels"]]
        slow = slowdowns_of({"us": [table["us"][i] for i in rows]})
        problems = [group.problems[i] for i in rows]
        at = [features(p, spec) for p in problems]
        columns, judged = choose(at, slow, [campaign.source_of(k) for k in kernels])
        made[group.name] = {
            "features": at,
            "all": slow,
            "problems": problems,
            "kernels": [kernels[k] for k in columns],
            "chosen": [[row[k] for k in columns] for row in slow],
            "judged": judged,
        }
    if wanted_tune:
        tune(made)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpu")
    parser.add_argument("campaign", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--tune", action="store_true")
    words = parser.parse_args()
    about, groups, tables = campaign.load(words.campaign)
    made = build(groups, tables, words.gpu, words.tune)
    classes, every = {}, []
    for name, c in made.items():
        judged: Judged = judge(c["features"], c["chosen"])
        oracle = [min(s for s in row if s) for row in c["chosen"] if any(row)]
        every += judged.regrets
        print(
            f"{name:18} {len(c['kernels'])} kernels of {len(c['all'][0]):2}, {len(c['problems']):2} problems: regret {judged.geomean:.3f}, "
            f"worst {judged.worst:.3f}; best of its kernels {math.exp(fmean(map(math.log, oracle))):.3f}, {max(oracle):.3f}  "
            f"{sorted({k.family for k in c['kernels']})}"
        )
        classes[name] = {
            "kernels": [{"family": k.family, "params": k.params} for k in c["kernels"]],
            "problems": [[getattr(p, f) for f in PROBLEM_FIELDS] for p in c["problems"]],
            "slowdowns": c["chosen"],
            "regret": round(judged.geomean, 4),
            "worst": round(judged.worst, 4),
        }
    every.sort()
    print(
        f"all: geomean {math.exp(fmean(map(math.log, every))):.4f}, 95 % {every[int(0.95 * len(every))]:.3f}, worst {every[-1]:.3f}"
    )
    output = words.output or DATA / f"{words.gpu}.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps({"about": about, "classes": classes}, separators=(",", ":")))
    print(f"wrote {output}, {output.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
