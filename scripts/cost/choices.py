"""What picks would lose on the problems of campaigns that the cost model's fit has not seen: among the kernels that
were timed there, the time of the one that it chooses over that of the fastest.

    python -m scripts.cost.fit --jobs 12 --judged 40 --scores SCORES.npz
    python -m scripts.cost.choices SCORES.npz reports/measurements/h100.npz/h100-2026-11-22-p0 \\
        reports/measurements/h100.npz/h100-2026-11-22-r0

With the same files in the repository as the fit had. A choice is made as at the end of climbs
(`evoattn/portfolio/refine.py`), of the campaigns' plain problems in 16 bits, or with --bits 32 in fp32.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.portfolio import campaign
from evoattn.portfolio.emphasis import BRIEF_US, kind_of
from evoattn.portfolio.pick import REFINED_DIM, class_kernels
from evoattn.portfolio.refine import A_GENE, genes_from
from scripts.cost.fit import EACH
from scripts.cost.measured import Row, files, launched_as_today, read, thinned
from scripts.cost.table import Floats

LEAST = 6
"""Kernels of a problem."""
HEAD = "| on | problems | geomean | 95th percentile | worst |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Choice:
    """A problem, the measured times of its kernels, and their scores."""

    problem: AttentionProblem
    us: Floats
    scores: Floats

    @property
    def lost(self) -> float:
        """The time of the kernel of least score over the least time."""
        return float(self.us[np.argmin(self.scores)] / self.us.min())

    def kinds(self) -> Iterator[str]:
        """What the problem counts among."""
        yield "all"
        yield kind_of(self.problem)
        yield self.problem.dtype
        yield f"best in {'less' if self.us.min() < BRIEF_US else 'more'} than {BRIEF_US:.0f} µs"


def choices(rows: Sequence[Row], scores: Floats, problems: set[AttentionProblem], gpu: GpuSpec) -> list[Choice]:
    """Of the problems that have enough rows of the card."""
    found: dict[AttentionProblem, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.problem in problems and row.source == "campaign" and row.gpu == gpu and np.isfinite(scores[i]):
            found[row.problem].append(i)
    return [
        Choice(problem, np.array([rows[i].us for i in chosen]), scores[chosen] * _factors(rows, chosen, gpu))
        for problem, chosen in found.items()
        if len(chosen) >= LEAST
    ]


def _factors(rows: Sequence[Row], chosen: Sequence[int], gpu: GpuSpec) -> Floats:
    """What a score counts more for genes that no kernel of the class has."""
    kernels = class_kernels(rows[chosen[0]].problem, gpu)
    return np.array([1 + A_GENE * genes_from(kernels, rows[i].config) for i in chosen])


def table(found: Mapping[str, Sequence[Choice]]) -> Iterator[str]:
    """Its rows: by campaign, all of its problems, then those of each kind."""
    for name, some in found.items():
        kinds: dict[str, list[float]] = defaultdict(list)
        for choice in some:
            for kind in choice.kinds():
                kinds[kind].append(choice.lost)
        for kind, lost in kinds.items():
            mean, high = np.exp(np.mean(np.log(lost))), np.quantile(lost, 0.95)
            yield f"| {name}, {kind} | {len(lost)} | {mean:.3f} | {high:.3f} | {max(lost):.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scores", type=Path, help="what scripts/cost/fit.py --scores wrote")
    parser.add_argument("campaigns", type=Path, nargs="+")
    parser.add_argument("--judged", type=int, default=EACH, help="as the fit was told")
    parser.add_argument("--bits", choices=("16", "32"), default="16", help="of the problems")
    options = parser.parse_args()
    rows, stored = thinned(launched_as_today(read(files())), options.judged), np.load(options.scores)
    scores = np.full(len(rows), np.nan)
    scores[stored["row"]] = stored["score"]
    if not np.allclose(np.array([row.us for row in rows])[stored["row"]], stored["us"]):
        parser.error("The scores are of other files of times.")
    found = {}
    for path in options.campaigns:
        about, groups, _ = campaign.load(path)
        plain = {
            p for group in groups for p in group.problems
            if (p.dtype == "fp32") == (options.bits == "32") and not p.variants and p.head_dim <= REFINED_DIM
        }  # fmt: skip
        found[path.name.removesuffix(".jsonl.gz")] = choices(rows, scores, plain, campaign.card(about["device"]))
    print(HEAD, *table(found), sep="\n")


if __name__ == "__main__":
    main()
