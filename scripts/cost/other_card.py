"""Judge the cost model on landscapes of a card by a fit to another card's times alone: a table.

python -m scripts.cost.other_card LANDSCAPES.jsonl.gz --fitted-on h100 --jobs 2

Two fits: to all times of that card, and to those of problems that the judged files do not have. Writes nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from scripts.cost.fit import EACH, report
from scripts.cost.fitting import fit, predict
from scripts.cost.measured import Row, files, launched_as_today, read, thinned
from scripts.cost.table import make_table


def fits_of(known: Sequence[Row], judged: Sequence[Row], card: str) -> dict[str, list[Row]]:
    """The rows of each fit, by the table's title, of kernels that are launched so today. Raises `ValueError` if a
    judged row is of the card itself, or a fit would have none."""
    if any(row.gpu.name == card for row in judged):
        raise ValueError(f"The judged files hold times of {card}, to which the model is fitted.")
    problems = {row.problem for row in judged}
    here = [row for row in launched_as_today(known) if row.gpu.name == card]
    other = [row for row in here if row.problem not in problems]
    if not other:
        raise ValueError(f"No times of other problems on {card}.")
    return {f"Fitted on {card}": here, f"Fitted on {card}, without these problems": other}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="judged")
    parser.add_argument("--fitted-on", default="h100", metavar="CARD")
    parser.add_argument("--known", nargs="+", type=Path, help="times for the fit; all of the repository, unless given")
    parser.add_argument("--each", type=int, default=EACH, help="rows of a problem in the fit")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    judged = launched_as_today(read(options.files))
    named = {path.resolve() for path in options.files}
    known = thinned(read(p for p in options.known or files() if p.resolve() not in named), options.each)
    table = make_table(judged, "compiler", options.jobs)
    for title, rows in fits_of(known, judged, options.fitted_on).items():
        fitted = fit(make_table(rows, "both", options.jobs), np.arange(len(rows)))
        report(title, judged, predict(table, np.arange(len(judged)), fitted))


if __name__ == "__main__":
    main()
