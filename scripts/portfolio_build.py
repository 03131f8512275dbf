"""Make an architecture's portfolio from campaigns that were measured on its cards; needs no GPU.

    python scripts/portfolio_build.py h100,h200 docs/campaigns/h200-*.jsonl.gz [-o FILE]

Of each class at most eight kernels are chosen, one by one, so that the rule loses least (`evoattn/portfolio/cover.py`).
The rule takes the kernel of the least predicted time (`evoattn/portfolio/work.py`, corrected by what was measured at
like problems: `evoattn/portfolio/likeness.py`). Prints each class's regret: time
over the best measured, each problem left out of the fit that judges it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec, lookup
from evoattn.portfolio import campaign, cover, shipped
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.features import class_of, features
from evoattn.portfolio.likeness import scaled, smooth, spread_points
from evoattn.portfolio.work import work_of

FEWEST = 7
"""Measured problems of a class from which on it has a choice of kernels of its own."""
FEWEST_ERRORS = 20
"""Times of a kernel from which on errors are carried over: with fewer, classes of fp32 lost more."""
DIGITS, WEIGHT_DIGITS, POINT_DIGITS = 5, 4, 2
"""Significant digits of a constant and of a weight, and digits behind the point of a scaled feature."""


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
    scaled: np.ndarray
    """[problems, features]: `likeness.scaled`."""
    units: list[list[int]]
    """Columns of the kernels of one compiled source."""
    prior: dict[str, cover.Usual]
    """By family."""

    @property
    def timed(self) -> list[int]:
        """Problems that any kernel was timed on."""
        return [i for i in range(len(self.us)) if not np.isnan(self.us[i]).all()]


def measured(group: Group, table: dict[str, Any], gpus: list[GpuSpec]) -> Measured:
    """The final table of a group, with the work of every kernel on every problem; `gpus` are the cards of its rows."""
    us = np.array([[time or np.nan for time in row] for row in table["us"]], dtype=float)
    kernels = [group.kernels[k] for k in table["kernels"]]
    resident = [resident_blocks(k, group, gpus[0]) for k in kernels]
    work = np.array(
        [
            [work_of(k.family, k.params, r, p, gpu) for p, gpu in zip(group.problems, gpus, strict=True)]
            for k, r in zip(kernels, resident, strict=True)
        ]
    )
    units: dict[str, list[int]] = {}
    for column, kernel in enumerate(kernels):
        units.setdefault(campaign.source_of(kernel), []).append(column)
    us = one_speed(us, work, [gpu.name for gpu in gpus])
    prior = {}
    for family in {k.family for k in kernels}:
        columns = [c for c, k in enumerate(kernels) if k.family == family]
        rows, picked = np.nonzero(~np.isnan(us[:, columns]))
        chosen = np.array(columns)[picked]
        prior[family] = cover.usual(work[chosen, rows], us[rows, chosen])
    points = scaled([features(p, gpu) for p, gpu in zip(group.problems, gpus, strict=True)])
    return Measured(group, kernels, resident, us, work, points, list(units.values()), prior)


def one_speed(us: np.ndarray, work: np.ndarray, cards: list[str]) -> np.ndarray:
    """The times [problems, kernels] at the speed of the first row's card: those of each other card times the factor
    that makes constants fitted on the first right in the median. (Of one architecture, at other clocks.)"""
    first = [i for i, card in enumerate(cards) if card == cards[0]]
    made = us.copy()
    for card in sorted(set(cards) - {cards[0]}):
        rows = [i for i, other in enumerate(cards) if other == card]
        logs = []
        for column in range(us.shape[1]):
            timed = [i for i in first if not np.isnan(us[i, column])]
            if len(timed) >= FEWEST:
                predicted = work[column][rows] @ cover.fit(work[column][timed], us[timed, column])
                logs.append(np.log(predicted / us[rows, column]))
        factor = float(np.exp(np.nanmedian(logs))) if logs else 1.0
        made[rows] *= factor
    return made


def predictions(m: Measured, rows: list[int], points: np.ndarray) -> np.ndarray:
    """[problems, kernels]: each time of the `rows` as predicted without that problem."""
    predicted = np.full(m.us.shape, np.nan)
    for unit in m.units:
        prior = m.prior[m.kernels[unit[0]].family]
        for i in rows:
            constants = cover.fit_source(m.work[unit], m.us[:, unit], prior, without=i)
            predicted[i, unit] = m.work[unit, i] @ constants
    for column in range(m.us.shape[1]):
        timed = [i for i in rows if not np.isnan(m.us[i, column])]
        if len(timed) >= FEWEST_ERRORS:
            errors = np.log(m.us[timed, column] / predicted[timed, column])
            predicted[timed, column] *= np.exp(smooth(points, m.scaled[timed], errors).left_out)
    return predicted


def made_kernel(m: Measured, rows: list[int], unit: list[int], points: np.ndarray, used: set[int]) -> dict[str, Any]:
    """One compiled source in the portfolio's file: constants of all its variants, and the errors of those that are
    `used`."""
    kernel = m.kernels[unit[0]]
    constants = cover.fit_source(m.work[unit], m.us[:, unit], m.prior[kernel.family])
    kept = [c for c in unit if c in used] or unit[:1]
    errors = []
    for column in kept:
        timed = [i for i in rows if not np.isnan(m.us[i, column])]
        found = np.zeros(len(points))
        if len(timed) >= FEWEST_ERRORS:
            logs = np.log(m.us[timed, column] / (m.work[column, timed] @ constants))
            found = smooth(points, m.scaled[timed], logs).weights
        errors.append([float(f"{w:.{WEIGHT_DIGITS}g}") for w in found])
    row = {
        "family": kernel.family,
        "params": m.kernels[kept[0]].params,
        "resident": m.resident[unit[0]],
        "constants": [float(f"{c:.{DIGITS}g}") for c in constants],
        "errors": errors,
    }
    if len(unit) > 1:
        row["splits"] = [m.kernels[c].params["SPLITS"] for c in kept]
    return row


def build_class(m: Measured, rows: list[int]) -> tuple[dict[str, Any], cover.Judged]:
    """One class of the portfolio's file, judged on the problems `rows` of its group."""
    points = m.scaled[rows][spread_points(m.scaled[rows])].round(POINT_DIGITS)
    predicted = predictions(m, rows, points)
    chosen, judged = cover.choose(m.us[rows], predicted[rows], m.units)
    columns = [c for u in chosen for c in m.units[u]]
    used = {columns[c] for c in cover.choices(m.us[rows], predicted[rows], columns)}
    return {
        "points": points.tolist(),
        "kernels": [made_kernel(m, rows, m.units[u], points, used) for u in chosen],
        "problems": len(rows),
        "regret": round(judged.geomean, 4),
        "worst": round(judged.worst, 4),
    }, judged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cards", help="that the portfolio may run on unasked, by commas")
    parser.add_argument("campaigns", type=Path, nargs="+", help="of a problem that several have timed the last counts")
    parser.add_argument("-o", "--output", type=Path)
    words = parser.parse_args()
    parts: dict[str, list[campaign.Part]] = {}
    abouts: list[dict[str, Any]] = []
    for path in words.campaigns:
        about, groups, tables = campaign.load(path)
        abouts.append(about)
        for group in groups:
            if tables.get(group.name, {}).get("kernels"):
                part = campaign.Part(group, tables[group.name], campaign.card(about["device"]))
                parts.setdefault(group.name, []).append(part)
    classes, regrets = {}, []
    for found in parts.values():
        group, table, gpus = campaign.merged(found)
        m = measured(group, table, gpus)
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
    output = words.output or shipped.DATA / f"{lookup(words.cards.split(',')[0]).arch}{shipped.SUFFIX}"
    output.parent.mkdir(exist_ok=True)
    shipped.save(output, words.cards.split(","), abouts, classes)
    print(f"wrote {output}, {output.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
