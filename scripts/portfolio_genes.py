"""Let the cost model's climbs use values that are younger than a portfolio's kernels.

    python scripts/portfolio_genes.py CAMPAIGN… [--portfolio evoattn/portfolio/data/…]

A climb from a pick (`evoattn/portfolio/refine.py`) takes values of genes that the portfolio names: those that its own
kernels have, and those that kernels of the campaigns here have, which were right and with which the cost model was
fitted. Only the first line of the portfolio's file changes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evoattn.model.space import Value
from evoattn.portfolio import campaign, shipped
from evoattn.portfolio.engine.kernel import Kernel

LEAST = 5
"""Right kernels that have a value."""

Genes = dict[str, dict[str, list[Value]]]


def with_values(genes: Genes, kernels: Iterable[Kernel]) -> Genes:
    """The genes of each family that is there, and the values that at least LEAST of the kernels have."""
    counts: Counter[tuple[str, str, Value]] = Counter()
    for kernel in kernels:
        if kernel.state == "right" and kernel.family in genes:
            counts.update((kernel.family, name, value) for name, value in kernel.params.items())
    found = {family: {name: set(values) for name, values in row.items()} for family, row in genes.items()}
    for (family, name, value), count in counts.items():
        if count >= LEAST:
            found[family].setdefault(name, set()).add(value)
    return {family: {name: sorted(values) for name, values in row.items()} for family, row in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaigns", type=Path, nargs="+")
    parser.add_argument("--portfolio", type=Path, default=shipped.DATA / f"sm_90a{shipped.SUFFIX}")
    words = parser.parse_args()
    first, *lines = words.portfolio.read_text(encoding="utf-8").splitlines()
    head: dict[str, Any] = json.loads(first)
    loaded = (campaign.load(path) for path in words.campaigns)
    kernels = [kernel for _, groups, _ in loaded for group in groups for kernel in group.kernels.values()]
    genes = with_values(head["genes"], kernels)
    for family, row in genes.items():
        for name, values in row.items():
            if new := [v for v in values if v not in head["genes"][family].get(name, ())]:
                print(family, name, *new)
    rows = [json.dumps(head | {"genes": genes}, separators=(",", ":")), *lines]
    words.portfolio.write_text("".join(row + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
