"""Fit the cost model to all measured times in the repository, judge it on problems left out, and write the tables.

OMP_NUM_THREADS=2 python -m scripts.cost.fit            # some minutes; writes evoattn/cost/data/fitted.npz
python -m scripts.cost.fit --judge-only
python -m scripts.cost.fit docs/campaigns/h*.jsonl.gz --fit-only FILE   # no judging
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from evoattn.cost.cost import MOST_CORRECTION, physical_part
from evoattn.cost.features import features
from evoattn.cost.fitted import DATA, Fitted, Weights, save
from evoattn.cost.launch_time import LaunchTerms, launch_terms
from evoattn.cost.physics import BESIDE, OVERLAPPED_SHARE, UNITS, Physics
from evoattn.families import registry
from scripts.cost.boosting import fit_trees
from scripts.cost.judge import HEAD, LEAST, Judgement, judge
from scripts.cost.measured import Row, files, read, thinned

Floats = NDArray[np.float64]
EACH = 40
"""Rows of a problem in the fit."""
JUDGED = 40
"""Rows of a problem of a campaign that are judged: a third of them its fastest. Of landscapes all are."""
SAMPLE = 12_000
"""Rows from which the physical weights are fitted."""
HOPPER_ONLY = ("wgmma", "tma", "cluster")
FOLDS = 3
UNIT_BOUNDS = {"tensor": (1, 3), "fp32": (0.8, 3), "special": (1, 3), "issue": (1, 3), "shared": (0.9, 3),
               "l2": (0.5, 3), "dram": (1, 2)}  # fmt: skip
"""No unit is faster than its peak; L2 and instruction counts are known less well."""
FAMILY_BOUNDS = {"chain": (0.05, 3), "fetch": (0.02, 3), "ends": (0.05, 4), "launch_us": (0.5, 6)}
TERMS = (*UNITS, "dram", "chain", "fetch", "ends")
MOST_LAUNCHES = 3


def unknown_registers(row: Row) -> bool:
    """A third of the rows are fitted with the family's own estimate of registers, as before a compile."""
    return hash((row.config.params.get("BLOCK_M"), row.us)) % 3 == 0


def term_table(rows: Sequence[Row]) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """([row, launch, term] in µs, [row, launch] shares of a launch's fixed time, which rows fit on an SM)."""
    terms, shares = np.zeros((len(rows), MOST_LAUNCHES, len(TERMS))), np.zeros((len(rows), MOST_LAUNCHES))
    fits = np.ones(len(rows), bool)
    for i, row in enumerate(rows):
        works = registry.lookup(row.family).work(row.problem, row.config, row.registers)
        for j, work in enumerate(works):
            found = launch_terms(work, row.gpu)
            if found is None:
                fits[i] = False
                break
            terms[i, j] = _in_us(found, row)
            shares[i, j] = OVERLAPPED_SHARE if work.overlaps else 1.0
    return terms, shares, fits


def _in_us(found: LaunchTerms, row: Row) -> list[float]:
    us = 1e-3 / row.gpu.boost_clock_ghz
    dram = found.dram_bytes / row.gpu.dram_gb_per_s / 1e3
    return [*(found.units[n] * us for n in UNITS), dram, found.chain * us, found.fetch * us, found.ends * us]


def fit_weights(rows: Sequence[Row], seed: int = 0) -> dict[str, Weights]:
    """Factors of the physical terms, by bounded least squares of logarithms: units for all families together, waits
    and launches for each."""
    families = sorted({row.family for row in rows})
    chosen = np.random.default_rng(seed).permutation(len(rows))[:SAMPLE]
    rows = [rows[i] for i in chosen]
    terms, shares, fits = term_table(rows)
    terms, shares = terms[fits], shares[fits]
    kept = [row for row, ok in zip(rows, fits, strict=True) if ok]
    measured = np.log([row.us for row in kept])
    family = np.array([families.index(row.family) for row in kept])
    units = len(UNITS) + 1

    def residuals(logs: Floats) -> Floats:
        unit, each = np.exp(logs[:units]), np.exp(logs[units:]).reshape(len(families), 4)[family]
        beside = terms[:, :, :units] * unit
        waits = terms[:, :, units] * each[:, :1] + terms[:, :, units + 1] * each[:, 1:2]
        total = ((beside**BESIDE).sum(2) + waits**BESIDE) ** (1 / BESIDE) + terms[:, :, units + 2] * each[:, 2:3]
        result: Floats = np.log((total + shares * each[:, 3:]).sum(1)) - measured
        return result

    bounds = np.log([*UNIT_BOUNDS.values(), *list(FAMILY_BOUNDS.values()) * len(families)])
    solved = least_squares(residuals, bounds.mean(1), bounds=(bounds[:, 0], bounds[:, 1]), loss="soft_l1", f_scale=0.15)
    factors = np.exp(solved.x)
    common = dict(zip((*UNITS, "dram"), map(float, factors[:units]), strict=True))
    each = factors[units:].reshape(len(families), 4)
    found = {name: Weights(common, *map(float, each[i])) for i, name in enumerate(families)}
    usual = Weights(common, *map(float, np.exp(np.log(each).mean(0))))  # of a family without a measured kernel
    return {name: found.get(name, usual) for name in registry.FAMILIES}


def feature_rows(
    rows: Sequence[Row], fitted: Fitted, estimate: bool | None = None
) -> tuple[list[dict[str, float]], list[Physics | None]]:
    """Features of each row, and its physical part: None where no block fits. `estimate`: take the family's estimate of
    registers for all rows or for none; for some, as in the fit, where it is None."""
    found: list[dict[str, float]] = []
    parts: list[Physics | None] = []
    for row in rows:
        guess = unknown_registers(row) if estimate is None else estimate
        part = physical_part(row.problem, row.config, row.gpu, 0 if guess else row.registers, fitted)
        parts.append(part)
        found.append(features(row.problem, part, row.gpu, row.spill_bytes) if part else {})
    return found, parts


def near_best(rows: Sequence[Row]) -> Floats:
    """Weights: 1.3 for the best of a problem, falling to 0.3 for those far behind."""
    best: dict[object, float] = {}
    for row in rows:
        key = row.gpu.name, row.problem
        best[key] = min(best.get(key, math.inf), row.us)
    factors = np.array([row.us / best[row.gpu.name, row.problem] for row in rows])
    weights: Floats = 0.3 + np.exp(-(factors - 1) / 0.15)
    return weights


def fit(rows: Sequence[Row], each: int = EACH) -> Fitted:
    """The whole model from these rows."""
    rows = thinned(rows, each)
    fitted = Fitted(fit_weights(rows), {}, {})
    near, measured = near_best(rows), np.array([row.us for row in rows])
    found, parts = feature_rows(rows, fitted)
    physical = np.array([part.us if part else math.inf for part in parts])
    for family in sorted({row.family for row in rows}):
        chosen = [i for i, row in enumerate(rows) if row.family == family and math.isfinite(physical[i])]
        if len(chosen) >= 200:
            part = [found[i] for i in chosen]
            fitted.trees[family] = fit_trees(part, physical[chosen], measured[chosen], near[chosen])
    return fitted


def predict(rows: Sequence[Row], fitted: Fitted, estimate: bool = False) -> Floats:
    """Scores, as `evoattn.cost.cost.cost` gives them."""
    found, parts = feature_rows(rows, fitted, estimate)
    factors = np.ones(len(rows))
    for family, trees in fitted.trees.items():
        chosen = [i for i, row in enumerate(rows) if row.family == family and found[i]]
        if chosen:
            table = np.array([[found[i].get(name, math.nan) for name in trees.names] for i in chosen])
            factors[chosen] = np.exp(np.clip(trees.predict(table), -MOST_CORRECTION, MOST_CORRECTION))
    return np.array([part.corrected(f) if part else math.inf for part, f in zip(parts, factors, strict=True)])


def for_all_cards(row: Row) -> bool:
    """Whether a card without wgmma, tensor copies and clusters has this config too."""
    values = {str(v) for v in row.config.params.values()}
    return row.family != "flash_wgmma" and not values & set(HOPPER_ONLY)


def tables(rows: Sequence[Row], score: Floats) -> list[tuple[str, Judgement]]:
    """The judged sets: all, each card and source, families of any card alone, each family."""
    sets: list[tuple[str, list[int]]] = [("all", list(range(len(rows))))]
    for source in sorted({row.source for row in rows}):
        for card in sorted({row.gpu.name for row in rows}):
            here = [i for i, row in enumerate(rows) if row.source == source and row.gpu.name == card]
            sets += [(f"{source}, {card}", here)]
            sets += [(f"{source}, {card}, no wgmma, TMA or cluster", [i for i in here if for_all_cards(rows[i])])]
    for family in sorted({row.family for row in rows}):
        sets.append((family, [i for i, row in enumerate(rows) if row.family == family]))
    judged = []
    for label, chosen in sets:
        keys = [(rows[i].gpu.name, rows[i].problem, rows[i].source) for i in chosen]
        if max(Counter(keys).values(), default=0) >= LEAST:
            judged.append((label, judge(score[chosen], [rows[i].us for i in chosen], keys)))
    return judged


def left_out(rows: Sequence[Row], folds: int, each: int) -> Floats:
    """Scores of every row by a model whose fit saw no time of its problem on any card."""
    problems = sorted({row.problem for row in rows}, key=lambda p: p.describe())
    np.random.default_rng(0).shuffle(problems)
    fold = {problem: i % folds for i, problem in enumerate(problems)}
    score = np.zeros(len(rows))
    for k in range(folds):
        inside = [row for row in rows if fold[row.problem] != k]
        outside = [i for i, row in enumerate(rows) if fold[row.problem] == k]
        score[outside] = predict([rows[i] for i in outside], fit(inside, each))
    return score


def whole_landscapes(rows: Sequence[Row], each: int) -> list[tuple[str, Judgement]]:
    """Campaigns are fitted, landscapes judged: kernels that no search had chosen."""
    judged = [row for row in rows if row.source == "landscape"]
    problems = {row.problem for row in judged}
    fitted = fit([row for row in rows if row.source == "campaign" and row.problem not in problems], each)
    return tables(judged, predict(judged, fitted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: all of the repository")
    parser.add_argument("--judge-only", action="store_true", help="write no file")
    parser.add_argument("--fit-only", type=Path, metavar="FILE", help="write the fit there, and judge nothing")
    parser.add_argument("--folds", type=int, default=FOLDS)
    parser.add_argument("--each", type=int, default=EACH, help="rows of a problem in the fit")
    parser.add_argument("--judged", type=int, default=JUDGED, help="rows of a campaign's problem that are read at all")
    options = parser.parse_args()
    if options.fit_only:
        save(fit(read(options.files or files()), options.each), options.fit_only)
        return
    started = time.monotonic()
    every = read(options.files or files())
    rows = thinned(every, options.judged)
    print(f"{len(rows)} times of {len({(r.gpu.name, r.problem) for r in rows})} problems and cards")
    score = left_out(rows, options.folds, options.each)
    print("Problems left out of the fit:\n" + HEAD)
    judged = tables(rows, score)
    for label, found in judged:
        print(found.line(label))
    cards = sorted({row.gpu.name for row in rows})
    if len(cards) > 1:
        first = [row for row in rows if row.gpu.name == cards[0]]
        others = [row for row in rows if row.gpu.name != cards[0]]
        print(f"Fitted on the {cards[0]} alone:\n" + HEAD)
        for label, found in tables(others, predict(others, fit(first, options.each))):
            print(found.line(label))
    if any(row.source == "landscape" for row in every):
        print("Fitted on campaigns alone, judged on whole landscapes, of problems that the fit did not see:\n" + HEAD)
        for label, found in whole_landscapes(every, options.each):
            print(found.line(label))
    if not options.judge_only:
        fitted = fit(rows, options.each)
        fitted.about.update(
            files=[path.name for path in options.files or files()], times=len(rows),
            cards=cards, made=time.strftime("%Y-%m-%d"), left_out={label: vars(found) for label, found in judged},
        )  # fmt: skip
        save(fitted)
        print(f"Wrote {DATA} ({DATA.stat().st_size >> 10} KB)")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
