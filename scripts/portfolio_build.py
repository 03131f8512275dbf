"""Make an architecture's portfolio from campaigns that were measured on one of its cards; needs no GPU.

    python scripts/portfolio_build.py h200 docs/campaigns/h200-*.jsonl.gz --for h100,h200 [-o FILE]

Of each class at most eight kernels are chosen, one by one, so that the rule loses least (`evoattn/portfolio/cover.py`).
The rule takes the kernel of the least predicted time (`evoattn/portfolio/work.py`). Prints each class's regret: time
over the best measured, each problem left out of the fit that judges it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Measured:
    """One group of a campaign, as arrays: `us` [problems, kernels], `work` [kernels, problems, terms]."""

    group: Group
    kernels: list[Kernel]
    resident: list[int]
    us: np.ndarray
    work: np.ndarray
    units: list[list[int]]
    """Columns of the kernels of one compiled source."""
    prior: dict[str, cover.Usual]
    """By family."""

    @property
    def timed(self) -> list[int]:
        """Problems that any kernel was timed on."""
        return [i for i in range(len(self.us)) if not np.isnan(self.us[i]).all()]


def measured(group: Group, table: dict[str, Any], gpu: GpuSpec) -> Measured:
    """The final table of a group, with the work of every kernel on every problem."""
    us = np.array([[time or np.nan for time in row] for row in table["us"]], dtype=float)
    kernels = [group.kernels[k] for k in table["kernels"]]
    resident = [resident_blocks(k, group, gpu) for k in kernels]
    work = np.array(
        [
            [work_of(k.family, k.params, r, p, gpu) for p in group.problems]
            for k, r in zip(kernels, resident, strict=True)
        ]
    )
    units: dict[str, list[int]] = {}
    for column, kernel in enumerate(kernels):
        units.setdefault(campaign.source_of(kernel), []).append(column)
    prior = {}
    for family in {k.family for k in kernels}:
        columns = [c for c, k in enumerate(kernels) if k.family == family]
        rows, picked = np.nonzero(~np.isnan(us[:, columns]))
        chosen = np.array(columns)[picked]
        prior[family] = cover.usual(work[chosen, rows], us[rows, chosen])
    return Measured(group, kernels, resident, us, work, list(units.values()), prior)


def predictions(m: Measured, rows: list[int]) -> np.ndarray:
    """[problems, kernels]: each time of the `rows` as predicted by constants fitted without that problem."""
    predicted = np.full(m.us.shape, np.nan)
    for unit in m.units:
        prior = m.prior[m.kernels[unit[0]].family]
        for i in rows:
            constants = cover.fit_source(m.work[unit], m.us[:, unit], prior, without=i)
            predicted[i, unit] = m.work[unit, i] @ constants
    return predicted


def build_class(m: Measured, rows: list[int]) -> tuple[dict[str, Any], cover.Judged]:
    """One class of the portfolio's file, judged on the problems `rows` of its group."""
    predicted = predictions(m, rows)
    chosen, judged = cover.choose(m.us[rows], predicted[rows], m.units)
    made = []
    for unit in (m.units[u] for u in chosen):
        kernel = m.kernels[unit[0]]
        constants = cover.fit_source(m.work[unit], m.us[:, unit], m.prior[kernel.family])
        row = {
            "family": kernel.family,
            "params": kernel.params,
            "resident": m.resident[unit[0]],
            "constants": [float(f"{c:.{DIGITS}g}") for c in constants],
        }
        if len(unit) > 1:
            row["splits"] = sorted(m.kernels[c].params["SPLITS"] for c in unit)
        made.append(row)
    return {
        "kernels": made,
        "problems": len(rows),
        "regret": round(judged.geomean, 4),
        "worst": round(judged.worst, 4),
    }, judged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpu", help="the card of the campaigns")
    parser.add_argument("--for", dest="cards", help="cards that the portfolio may run on unasked, by commas")
    parser.add_argument("campaigns", type=Path, nargs="+", help="of a problem that several have timed the last counts")
    parser.add_argument("-o", "--output", type=Path)
    words = parser.parse_args()
    parts: dict[str, list[tuple[Group, dict[str, Any]]]] = {}
    abouts: list[dict[str, Any]] = []
    for path in words.campaigns:
        about, groups, tables = campaign.load(path)
        abouts.append(about)
        for group in groups:
            if tables.get(group.name, {}).get("kernels"):
                parts.setdefault(group.name, []).append((group, tables[group.name]))
    gpu = lookup(words.gpu)
    classes, regrets = {}, []
    for group, table in map(campaign.merged, parts.values()):
        m = measured(group, table, gpu)
        names = [class_of(p) for p in group.problems]
        for name in sorted(set(names)):
            rows = [i for i in m.timed if names[i] == name]
            if len(rows) < FEWEST:  # too few to choose by: the class takes the kernels that suit its group
                rows = m.timed
            classes[name], judged = build_class(m, rows)
            regrets += list(judged.regrets)
            families = sorted({k["family"] for k in classes[name]["kernels"]})
            sizes = f"{len(classes[name]['kernels'])} kernels, {len(rows):2} problems"
            lost = f"regret {judged.geomean:.3f}, worst {judged.worst:.3f}"
            print(f"{name:20} {sizes}: {lost} {', '.join(families)}", flush=True)
    every = np.array(regrets)
    print(
        f"all {len(every)} problems, left out: geomean {np.exp(np.log(every).mean()):.4f}, 95th percentile "
        f"{np.quantile(every, 0.95):.3f}, worst {every.max():.3f}"
    )
    output = words.output or DATA / f"{gpu.arch}.json"
    output.parent.mkdir(exist_ok=True)
    cards = (words.cards or words.gpu).split(",")
    output.write_text(json.dumps({"cards": cards, "about": abouts, "classes": classes}, separators=(",", ":")))
    print(f"wrote {output}, {output.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
