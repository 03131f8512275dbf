"""How a card that was never measured would choose among kernels that were: its order against the H100's measured one.

python -m scripts.cost.elsewhere docs/landscapes/h100-*.jsonl.gz --gpu l4
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from scipy.stats import spearmanr

from evoattn.cost.cost import cost
from evoattn.families import registry
from evoattn.model.gpu import lookup
from evoattn.model.problem import AttentionProblem
from scripts.cost.judged_sets import for_all_cards
from scripts.cost.measured import Row, read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--gpu", default="l4")
    options = parser.parse_args()
    gpu = lookup(options.gpu)
    problems: dict[AttentionProblem, list[Row]] = defaultdict(list)
    for row in read(options.files):
        if row.gpu.name == "h100" and for_all_cards(row):
            valid = registry.lookup(row.family).why_invalid(row.problem, row.config, gpu) is None
            if valid:
                problems[row.problem].append(row)
    name = gpu.name
    print(f"| problem | kernels | order of {name} and measured H100 | {name}'s first | bound | its place on the H100 |")
    print("|---|---|---|---|---|---|")
    for problem, rows in problems.items():
        found = [cost(problem, row.config, gpu, row.registers) for row in rows]
        scored = [(one.score, row, one) for one, row in zip(found, rows, strict=True) if one]
        if len(scored) < 20:
            continue
        correlation = spearmanr([s for s, _, _ in scored], [row.us for _, row, _ in scored])[0]
        _, first, said = min(scored, key=lambda item: item[0])
        best = min(row.us for _, row, _ in scored)
        place = 1 + sum(row.us < first.us for _, row, _ in scored)
        tile = f"{first.family} {first.config['BLOCK_M']}×{first.config['BLOCK_N']}"
        print(
            f"| {problem.describe()} | {len(scored)} | {correlation:.2f} | {tile} | {said.bound} | {place}, "
            f"{first.us / best:.2f} times the best |"
        )


if __name__ == "__main__":
    main()
