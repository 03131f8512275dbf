"""Make a card's portfolio from a campaign that was measured on it; needs no GPU.

    python scripts/portfolio_build.py h100 docs/campaigns/h100-2026-11-22-b.jsonl.gz [-o FILE]

Of each class at most eight kernels are chosen, one by one, so that the rule loses least (`evoattn/portfolio/cover.py`).
The rule takes the kernel of the least predicted time (`evoattn/portfolio/work.py`). Prints each class's regret: time
over the best measured, each problem left out of the fit that judges it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec, lookup
from evoattn.portfolio import campaign, cover
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.features import class_of
from evoattn.portfolio.shipped import DATA
from evoattn.portfolio.work import work_of

FEWEST = 7
"""Measured problems of a class from which on it has a choice of kernels of its own."""
DIGITS = 5
"""Significant digits of a constant: its fit is good to two."""


def resident_blocks(kernel: Kernel, group: Group, gpu: GpuSpec) -> int:
    """Blocks of the kernel that fit on one SM, by its registers and shared memory."""
    launch = registry.lookup(kernel.family).launches(group.problems[0], kernel.config, gpu)[0]
    return max(1, gpu.blocks_resident(kernel.registers, launch.threads, launch.smem_bytes))


def build_class(
    group: Group, kernels: list[Kernel], times: np.ndarray, rows: list[int], gpu: GpuSpec
) -> tuple[dict[str, Any], cover.Judged]:
    """One class of the portfolio's file, out of the rows of the group's final table that are of this class."""
    problems = [group.problems[i] for i in rows]
    us = times[rows]
    used = [k for k in range(len(kernels)) if (~np.isnan(us[:, k])).any()]
    kernels, us = [kernels[k] for k in used], us[:, used]
    resident = [resident_blocks(k, group, gpu) for k in kernels]
    work = [
        np.array([work_of(k.family, k.params, r, p, gpu) for p in problems])
        for k, r in zip(kernels, resident, strict=True)
    ]
    predicted = cover.predictions_left_out(work, us)
    chosen, judged = cover.choose(us, predicted, [campaign.source_of(k) for k in kernels])
    rows_made = []
    for k in chosen:
        known = ~np.isnan(us[:, k])
        constants = cover.fit(work[k][known], us[known, k])
        rows_made.append(
            {
                "family": kernels[k].family,
                "params": kernels[k].params,
                "resident": resident[k],
                "constants": [float(f"{c:.{DIGITS}g}") for c in constants],
            }
        )
    made = {
        "kernels": rows_made,
        "problems": len(problems),
        "regret": round(judged.geomean, 4),
        "worst": round(judged.worst, 4),
        "sources": len({campaign.source_of(kernels[k]) for k in chosen}),
    }
    return made, judged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpu")
    parser.add_argument("campaign", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    words = parser.parse_args()
    about, groups, tables = campaign.load(words.campaign)
    gpu = lookup(words.gpu)
    classes, regrets = {}, []
    for group in groups:
        table = tables[group.name]
        times = np.array([[us if us else np.nan for us in row] for row in table["us"]], dtype=float)
        kernels = [group.kernels[k] for k in table["kernels"]]
        names = [class_of(p) for p in group.problems]
        for name in sorted(set(names)):
            timed = [i for i in range(len(names)) if not np.isnan(times[i]).all()]
            rows = [i for i in timed if names[i] == name]
            if len(rows) < FEWEST:  # too few to choose by: the class takes the kernels that suit its group
                rows = timed
            made, judged = build_class(group, kernels, times, rows, gpu)
            classes[name] = made
            regrets += list(judged.regrets)
            families = sorted({k["family"] for k in made["kernels"]})
            sizes = f"{made['sources']} kernels, {len(rows):2} problems"
            print(
                f"{name:20} {sizes}: regret {judged.geomean:.3f}, worst {judged.worst:.3f} {', '.join(families)}",
                flush=True,
            )
    every = np.array(regrets)
    print(
        f"all {len(every)} problems, left out: geomean {np.exp(np.log(every).mean()):.4f}, 95th percentile "
        f"{np.quantile(every, 0.95):.3f}, worst {every.max():.3f}"
    )
    output = words.output or DATA / f"{words.gpu}.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps({"about": about, "classes": classes}, separators=(",", ":")))
    print(f"wrote {output}, {output.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
