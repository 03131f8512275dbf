"""How alike two measurings of the same kernels order them: no model can be nearer to either.

python -m scripts.cost.retest    # all campaigns of the repository
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evoattn.cost import measurements
from scripts.cost.judge import spread_table
from scripts.cost.measured import files

LEAST = 12
"""Kernels of a problem that were timed twice."""


def twice(path: Path) -> Iterator[tuple[list[float], list[float]]]:
    """Of each problem of a campaign: (times of the search, times of the final table) of the same kernels."""
    for group in measurements.campaign(path.parent, path.name).groups:
        final: dict[str, Any] = group.get("final") or {"kernels": [], "us": []}
        known = {kernel["id"]: kernel for kernel in group["kernels"]}
        for index, row in enumerate(final["us"]):
            pairs = [
                (known[name]["times"][str(index)], us)
                for name, us in zip(final["kernels"], row, strict=True)
                if us and name in known and str(index) in known[name]["times"] and index not in known[name]["rough"]
            ]
            if len(pairs) >= LEAST:
                yield [first for first, _ in pairs], [second for _, second in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: the campaigns of the repository")
    paths = parser.parse_args().files or [path for path in files() if path.parent.suffix == ".npz"]
    problems = [found for path in paths for found in twice(path)]
    first = [us for search, _ in problems for us in search]
    second = [us for _, final in problems for us in final]
    keys = [i for i, (search, _) in enumerate(problems) for _ in search]
    print(spread_table(first, second, keys, LEAST))


if __name__ == "__main__":
    main()
