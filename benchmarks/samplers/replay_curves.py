"""Draw what replays came to: best so far over the best, against candidates and against seconds.

    python -m benchmarks.samplers.replay_curves replays.json.gz -o reports/samplers.svg

A curve is the median over the seeds of each landscape, then the geometric mean over the landscapes. Also prints the
table of `benchmarks/samplers/replay.py` anew, and how the default stands beside each other sampler.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.samplers.replay import AT, WORST, Run, geomean, read, table

Floats = NDArray[np.float64]
WIDTH, HEIGHT, LEFT, TOP, GAP = 380, 260, 52, 34, 70
COLORS = {"guided": "#0b6e4f", "genetic": "#b23a48", "tpe": "#6c757d", "random": "#000000"}
"""Of the samplers that are drawn: replays of others, which are no more, are left out."""
CANDIDATES, SECONDS = (10, 500), (1.0, 20.0)
TOP_RATIO = 1.5
"""Highest ratio that is drawn."""


def middle(runs: list[Run], of: Callable[[Run, float], float], at: Floats) -> Floats:
    """The curve of one sampler."""
    lines = []
    for name in dict.fromkeys(r.landscape for r in runs):
        of_seeds = [[min(of(r, x), WORST) for x in at] for r in runs if r.landscape == name]
        lines.append(np.median(of_seeds, axis=0))
    curve: Floats = np.exp(np.mean(np.log(lines), axis=0))
    return curve


def panel(
    runs: list[Run], title: str, unit: str, of: Callable[[Run, float], float], bounds: tuple[float, float], left: float
) -> str:
    """One chart: a logarithmic axis of `bounds`, ratios from 1 to TOP_RATIO."""
    at = np.geomspace(*bounds, 80)
    span = np.log(bounds[1] / bounds[0])

    def place(x: float, ratio: float) -> tuple[float, float]:
        across = left + WIDTH * float(np.log(x / bounds[0]) / span)
        return across, TOP + HEIGHT * (1 - (min(ratio, TOP_RATIO) - 1) / (TOP_RATIO - 1))

    parts = [f'<text x="{left}" y="{TOP - 14}" font-weight="bold">{escape(title)}</text>']
    for ratio in (1.0, 1.02, 1.1, 1.2, 1.3, 1.4, 1.5):
        y = place(bounds[0], ratio)[1]
        dash = ' stroke-dasharray="4 3"' if ratio == 1.02 else ""
        parts.append(f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ccc"{dash}/>')
        if ratio != 1.02:
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{ratio:.1f}</text>')
    for x in (1, 2, 5, 10, 20, 50, 100, 200, 500):
        if bounds[0] <= x <= bounds[1]:
            across = place(x, 1)[0]
            parts.append(f'<text x="{across:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{x}</text>')
    parts.append(f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 34}" text-anchor="middle">{unit}</text>')
    for row, name in enumerate(dict.fromkeys(r.sampler for r in runs)):
        line = middle([r for r in runs if r.sampler == name], of, at)
        points = " ".join("{:.1f},{:.1f}".format(*place(x, r)) for x, r in zip(at, line, strict=True))
        color = COLORS[name]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        y = TOP + 16 + 16 * row
        parts.append(f'<text x="{left + WIDTH - 6}" y="{y}" text-anchor="end" fill="{color}">{name}</text>')
    return "\n".join(parts)


def _after(run: Run, candidates: float) -> float:
    return run.after(int(candidates))


def picture(parts: dict[str, list[Run]]) -> str:
    """All charts as one SVG: a row per beginning."""
    charts = []
    for row, (begin, runs) in enumerate(parts.items()):
        charts.append(f'<g transform="translate(0 {row * (HEIGHT + 90)})">')
        charts.append(panel(runs, f"begun at {begin} configs", "candidates", _after, CANDIDATES, LEFT))
        charts.append(panel(runs, "", "seconds of the replay", Run.at, SECONDS, LEFT + WIDTH + GAP))
        charts.append("</g>")
    size = f'width="{LEFT + 2 * WIDTH + GAP + 20}" height="{len(parts) * (HEIGHT + 90)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n'
        '<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(charts) + "\n</svg>\n"
    )


def beside(runs: list[Run], name: str) -> str:
    """A row per other sampler: the geomean of the default's best so far over the other's, by candidates."""
    lines = [f"| {name} over | {' | '.join(f'after {n}' for n in AT)} |", "|---|" + "---|" * len(AT)]
    mine = {(r.landscape, r.seed): r for r in runs if r.sampler == name}
    for other in dict.fromkeys(r.sampler for r in runs if r.sampler != name):
        pairs = [(mine[r.landscape, r.seed], r) for r in runs if r.sampler == other and (r.landscape, r.seed) in mine]
        ratios = [geomean([a.after(n) for a, _ in pairs]) / geomean([b.after(n) for _, b in pairs]) for n in AT]
        lines.append(f"| {other} | {' | '.join(f'{r:.3f}' for r in ratios)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("replays", type=Path)
    parser.add_argument("--default", default="guided")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    everything = read(options.replays)
    parts = {begin: [r for r in runs if r.sampler in COLORS] for begin, runs in everything.items()}
    options.output.write_text(picture(parts))
    for begin, runs in parts.items():
        names = {r.landscape for r in runs}
        seeds = {r.seed for r in runs}
        print(f"\nBegun at {begin} configs, {len(names)} landscapes, {len(seeds)} seeds:\n\n{table(runs, AT[-1])}\n")
        print(beside(runs, options.default))


if __name__ == "__main__":
    main()
