"""Make an architecture's portfolio from campaigns that were measured on its cards; needs no GPU.

    python scripts/portfolio_build.py h100,h200 docs/campaigns/h200-*.jsonl.gz [-o FILE]

Of each class at most eight kernels are chosen, one by one, so that the rule loses least (`evoattn/portfolio/cover.py`).
The rule takes the kernel of the least predicted time (`evoattn/portfolio/work.py`, corrected by what was measured at
like problems: `evoattn/portfolio/likeness.py`). Beside the measured problems it is judged on imagined ones, drawn as
they are, with predicted times in place of measured ones: so that a rare kind has its kernel too.

Prints each class's regret, time over the best measured, with a fifth of the problems at a time left out of everything:
the choice of kernels, their constants, and the errors that are carried over.

With --add the file keeps its groups that these campaigns lack, and the values that climbs may take. Classes in which
PyTorch was faster have no kernels (`evoattn/portfolio/behind.py`).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from evoattn.model.gpu import lookup
from evoattn.model.problem import AttentionProblem
from evoattn.portfolio import campaign, cover, shipped
from evoattn.portfolio.behind import beside_pytorch, faster
from evoattn.portfolio.draws import DRAWS, PLAIN, SCORES, drawn
from evoattn.portfolio.features import GROUPED
from evoattn.portfolio.fit import Fitted, Floats, parts
from evoattn.portfolio.measured import Measured, head_dim_of, measured, usual_of_plain
from evoattn.portfolio.strata import by_class
from evoattn.portfolio.workload import BUILD_SEEDS

Row = dict[str, Any]
DRAWN, DRAWN_OTHERS = {PLAIN: 1000, SCORES: 500}, 100
"""Problems drawn of each seed by kind, of which some are imagined."""
LEAST_WEIGHT, OTHERS_WEIGHT = 20.0, 0.1
"""The imagined problems of a class count together as much as the measured ones, but at least so much; those of the
group's other classes count a tenth."""
UNTIMED = 0.03
"""Logarithm of what an untimed kernel is taken to lose: of many predictions the least is too low."""
FEW_MEASURED = 12
"""Measured problems of a class, of which those of its sibling make up the number."""
FEW_PROBLEMS = 60
"""Of a group, up to which its kernels' constants lean on what is usual in plain attention of its head_dim."""
JUDGED_FOLDS = 5
FEWEST_JUDGED = 3
"""Of a class, below which the regrets of its group are said of it."""
DIGITS, WEIGHT_DIGITS = 5, 3
"""Significant digits of a constant and of a weight."""
NO_HEAD: Row = {"about": [], "genes": {}}


def covers(m: Measured, rows: list[int]) -> tuple[Fitted, dict[str, list[int]]]:
    """What is fitted to these problems, and of each size of a class the units that are chosen by them."""
    fitted, (times, seen) = m.table.fit(rows), m.table.left_out(rows)
    imagined = np.where(m.imagined.served, fitted.predict(m.imagined.work, m.imagined.scaled), np.nan)
    us, predicted = np.vstack([presumed(m, rows, times), imagined]), np.vstack([seen, imagined])
    sizes = np.array([m.sizes[i] for i in rows] + m.imagined.sizes)
    is_measured = np.arange(len(us)) < len(rows)
    can_be = ~np.isnan(us).all(axis=1)
    chosen = {}
    for size in sorted({form for s in [*m.sizes, *m.imagined.sizes] for form in (s, sibling(s))}):
        own = sizes == (size if size in sizes else sibling(size))
        weights = np.where(is_measured, np.where(own, 1.0, OTHERS_WEIGHT), 0.0)
        near = is_measured & ~own & (sizes == sibling(size))
        lacking = FEW_MEASURED - (own & is_measured).sum()
        weights[near] = np.clip(lacking / max(1, near.sum()), OTHERS_WEIGHT, 1.0)
        count = (own & ~is_measured).sum()
        weights[own & ~is_measured] = max(LEAST_WEIGHT, (own & is_measured).sum()) / max(1, count)
        counts = can_be & (weights > 0)
        chosen[size] = cover.choose(us[counts], predicted[counts], m.table.units, weights=weights[counts])
    return fitted, chosen


def presumed(m: Measured, rows: list[int], known: Floats) -> Floats:
    """The times of these problems [rows, kernels]; of kernels that can serve one and were not timed on it, as they are
    younger than its table, what is predicted (`known`), but no less than the best that was timed, and a little more."""
    us = m.table.us[rows]
    guessed = np.maximum(known, np.nanmin(us, axis=1, keepdims=True)) * math.exp(UNTIMED)
    return np.where(np.isnan(us) & m.served[rows], guessed, us)


def sibling(size: str) -> str:
    """The size that differs in whether query heads share K/V heads: it serves where a class has no problem."""
    return size.removesuffix(GROUPED) if size.endswith(GROUPED) else size + GROUPED


def left_out_regrets(m: Measured) -> Floats:
    """By timed problem, what the rule loses that is made without a fifth of them; NaN where its kernel was not timed
    there."""
    timed, regrets = m.timed, np.full(len(m.timed), np.nan)
    for places in parts(len(timed), JUDGED_FOLDS):
        left, rows = set(places), [timed[i] for i in places]
        fitted, chosen = covers(m, [row for i, row in enumerate(timed) if i not in left])
        predicted = fitted.expect(m.table.as_seen(rows))
        for place, row, times in zip(places, rows, predicted, strict=True):
            columns = [c for u in chosen[m.sizes[row]] for c in m.table.units[u] if m.served[row, c]]
            us = m.table.us[row]
            regrets[place] = us[min(columns, key=lambda c: times[c])] / np.nanmin(us) if columns else cover.UNSERVED
    return regrets


def used_columns(m: Measured, fitted: Fitted, chosen: dict[str, list[int]]) -> set[int]:
    """The kernels that the rule takes for any measured or imagined problem."""
    imagined = fitted.predict(m.imagined.work, m.imagined.scaled)
    predicted = np.vstack([fitted.expect(m.table.as_seen(range(len(m.sizes)))), imagined])
    predicted = np.where(np.vstack([m.served, m.imagined.served]), predicted, np.inf)
    used = set()
    for row, size in zip(predicted, m.sizes + m.imagined.sizes, strict=True):
        columns = [c for u in chosen[size] for c in m.table.units[u]]
        used.add(min(columns, key=lambda column: float(row[column])))
    return used


def rounded(values: Floats, digits: int) -> list[float]:
    """To so many significant digits."""
    return [float(f"{value:.{digits}g}") for value in values]


def build_group(m: Measured, regrets: Floats) -> dict[str, Any]:
    """One group of the portfolio's file; `regrets` are those of `left_out_regrets`."""
    fitted, chosen = covers(m, m.timed)
    used = used_columns(m, fitted, chosen)
    units = sorted({u for of_size in chosen.values() for u in of_size})
    rows = []
    for unit in (m.table.units[u] for u in units):
        kept = [c for c in unit if c in used] or list(unit[:1])
        row = {
            "family": m.kernels[unit[0]].family,
            "params": m.kernels[kept[0]].params,
            "resident": m.resident[unit[0]],
            "constants": rounded(fitted.constants[unit[0]], DIGITS),
            "errors": [rounded(fitted.weights[column], WEIGHT_DIGITS) for column in kept],
        }
        if len(unit) > 1:
            row["splits"] = [m.kernels[column].params["SPLITS"] for column in kept]
        rows.append(row)
    classes = {}
    for size, of_size in chosen.items():
        own = np.array([m.sizes[i] == size for i in m.timed])
        known = ~np.isnan(regrets)
        judged = judged_as(regrets[own & known] if (own & known).sum() >= FEWEST_JUDGED else regrets[known])
        classes[size] = {"kernels": [units.index(u) for u in of_size], "problems": int(own.sum()), **judged}
    return {"points": fitted.points.tolist(), "kernels": rows, "classes": classes}


def judged_as(regrets: Floats) -> dict[str, float | None]:
    """What a class's row says of regrets; None where no choice was timed."""
    judged = cover.Judged(regrets) if len(regrets) else None
    return {"regret": judged and round(judged.geomean, 4), "worst": judged and round(judged.worst, 4)}


def said(name: str, regrets: Floats) -> str:
    """A line for people."""
    if not len(regrets := regrets[~np.isnan(regrets)]):
        return f"{name:28}    0 no choice was timed where it was left out"
    judged, percentile = cover.Judged(regrets), np.quantile(regrets, 0.95)
    return f"{name:28} {len(regrets):4} {judged.geomean:.4f} {percentile:.3f} {judged.worst:.2f}"


def read(paths: list[Path]) -> tuple[list[dict[str, Any]], dict[str, list[campaign.Part]]]:
    """What is said about each campaign, and the final tables by group."""
    parts_of: dict[str, list[campaign.Part]] = {}
    abouts: list[dict[str, Any]] = []
    for path in paths:
        about, groups, tables = campaign.load(path)
        abouts.append(about)
        for group in groups:
            if tables.get(group.name, {}).get("kernels"):
                part = campaign.Part(group, tables[group.name], campaign.card(about["device"]))
                parts_of.setdefault(group.name, []).append(part)
    return abouts, parts_of


def looked_at(found: list[campaign.Part], problems: list[AttentionProblem]) -> Measured:
    """What was measured of a group. `problems` may be imagined."""
    return measured(*campaign.merged(found), problems)


def made(m: Measured) -> tuple[Floats, Row]:
    """`left_out_regrets` of a group, and its row of the file."""
    lost = left_out_regrets(m)
    return lost, build_group(m, lost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cards", help="that the portfolio may run on unasked, by commas")
    parser.add_argument("campaigns", type=Path, nargs="+", help="of a problem that several have timed the last counts")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--jobs", type=int, help="processes")
    parser.add_argument("--only", default="", help="groups with this in their names; the file keeps the others as is")
    parser.add_argument("--add", action="store_true", help="to the groups that the file has")
    words = parser.parse_args()
    output = words.output or shipped.DATA / f"{lookup(words.cards.split(',')[0]).arch}{shipped.SUFFIX}"
    abouts, parts_of = read(words.campaigns)
    groups_drawn = by_class(p for kind in DRAWS for p in drawn([kind], BUILD_SEEDS, DRAWN.get(kind, DRAWN_OTHERS)))
    groups: dict[str, dict[str, Any]] = {}
    regrets: dict[str, list[float]] = {}
    print(f"{'left out of everything':28} problems, geomean, 95th percentile, worst")
    head, kept = shipped.read(output) if words.only or words.add else (NO_HEAD, {})
    names = sorted({*parts_of, *(kept if words.add else ())})
    with ProcessPoolExecutor(words.jobs, multiprocessing.get_context("fork")) as pool:
        looking = {n: pool.submit(looked_at, of, groups_drawn.get(n, [])) for n, of in sorted(parts_of.items())}
        found = {name: future.result() for name, future in looking.items()}
        plain = usual_of_plain({name: m for name, m in found.items() if name == campaign.plain_name(name)})
        for name, m in found.items():
            if name != campaign.plain_name(name) and len(m.timed) <= FEW_PROBLEMS:
                found[name] = replace(m, table=replace(m.table, borrowed=plain.get(head_dim_of(name), {})))
        making = {name: pool.submit(made, m) for name, m in found.items() if words.only in name}
        for name in names:
            if name not in making:
                groups[name] = kept[name]
                continue
            lost, groups[name] = making[name].result()
            m = found[name]
            for i, regret in zip(m.timed, lost, strict=True):
                for kind in (f"{name.split()[0]} bits {m.sizes[i]}", f"{name.split()[0]} bits", "all"):
                    regrets.setdefault(kind, []).append(float(regret))
            print(said(name, lost), flush=True)
    ratios = beside_pytorch(part for parts in parts_of.values() for part in parts)
    for name in making:
        groups[name]["classes"] = faster(name, groups[name]["classes"], ratios)
    for kind, values in sorted(regrets.items()):
        print(said(kind, np.array(values)))
    head = head if words.add else NO_HEAD
    shipped.save(output, words.cards.split(","), [*head["about"], *abouts], groups, head["genes"])
    print(f"wrote {output}, {output.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
