"""What the page draws, as plain data: progress, samples of each family, slices of parameters, bars of the roofline."""

from __future__ import annotations

import math
from typing import Any

from evoattn.model.space import spelling
from evoattn.report.data import StudySummary
from evoattn.report.parameters import FamilySample, GeneValue
from evoattn.report.rows import Progress
from evoattn.timing.peers.labels import peer_label

MAX_POINTS = 1500
"""Candidates drawn in the progress plot: each is a node of the page, and more of them only cover each other."""
COLOURS = 8
"""Colours of the page's style sheet, `c0` and up."""


def family_colours(summary: StudySummary) -> dict[str, str]:
    """Family → class of the style sheet; the best family has the first colour."""
    names = dict.fromkeys([row.family for row in summary.best_of_families] + list(summary.families))
    return {name: f"c{n % COLOURS}" for n, name in enumerate(names)}


def figures(summary: StudySummary) -> dict[str, Any]:
    """All figures as JSON-ready values; `reports/figures.js` says how each is drawn."""
    return {
        "measured": summary.kind == "measured",
        "colours": family_colours(summary),
        "progress": _progress(summary),
        "samples": [_sample(sample) for sample in summary.samples],
        "slices": {sample.family: _slices(summary, sample.family) for sample in summary.samples},
        "notes": {i.family: i.why_not for i in summary.importances},
    }


def drawn_points(progress: Progress) -> list[int]:
    """Indices of the candidates to draw: all improvements, and of the others an even sample of `MAX_POINTS` at most."""
    count = len(progress.value)
    stride = max(1, -(-count // MAX_POINTS))
    return sorted({*range(0, count, stride), *progress.improvements})


def _progress(summary: StudySummary) -> dict[str, Any]:
    p = summary.progress
    drawn, improved = drawn_points(p), set(p.improvements)
    low, high = _value_range(summary)
    peers = [(b.backend, b.median_us) for b in summary.baselines if b.median_us is not None and b.median_us <= high]
    return {
        "trial": [p.trial[i] for i in drawn],
        "seconds": [round(p.elapsed_s[i], 3) for i in drawn],
        "family": [p.family[i] for i in drawn],
        "value": [p.value[i] for i in drawn],
        "improved": [i in improved for i in drawn],
        "low": low,
        "high": high,
        "peers": [{"name": peer_label(name), "value": us} for name, us in peers],
    }


def _value_range(summary: StudySummary) -> tuple[float, float]:
    """What the progress plot shows: all improvements and nine tenths of the candidates; a few are far slower."""
    p = summary.progress
    if not p.value:
        return 1.0, 1.0
    ordered = sorted(p.value)
    most = max(ordered[len(ordered) * 9 // 10], p.value[p.improvements[0]])
    least = min([ordered[0], *(b.median_us for b in summary.baselines if b.median_us is not None)])
    return max(least * 0.95, most * 1e-6), most * 1.1


def _sample(sample: FamilySample) -> dict[str, Any]:
    values = {name: [spelling(value) for value in seen] for name, seen in sample.values.items()}
    return {
        "family": sample.family,
        "values": values,
        "trial": sample.trial,
        "value": sample.value,
        "columns": sample.columns,
    }


def _slices(summary: StudySummary, family: str) -> list[dict[str, Any]]:
    """The parameters of one family that have several values, the most important first."""
    shares = next((i.shares for i in summary.importances if i.family == family), {})
    values: dict[str, list[GeneValue]] = {}
    for gene in summary.genes:
        if gene.family == family:
            values.setdefault(gene.gene, []).append(gene)
    order = next(sample.values for sample in summary.samples if sample.family == family)
    names = sorted(values, key=lambda name: -shares.get(name, 0.0))
    return [
        {
            "name": name,
            "share": shares.get(name),
            "rows": [
                {"value": spelling(g.value), "best": g.best, "median": g.median, "trials": g.trials}
                for g in sorted(
                    values[name], key=lambda g: order[name].index(g.value) if g.value in order[name] else -1
                )
            ],
        }
        for name in names
    ]


def ceilings(summary: StudySummary) -> list[dict[str, Any]]:
    """The roofs, the best of each family and the peers by TFLOP/s, the highest first; empty where nothing was timed.

    `width` is the length of a bar in per cent on a logarithmic scale, which begins at half of the least.
    """
    ours = [(row, row.tflops) for row in summary.best_of_families if row.tflops]
    if not ours or not summary.roofs:
        return []
    colours, leader = family_colours(summary), summary.leaderboard[0].trial
    rows: list[dict[str, Any]] = [
        {"kind": "kernel", "label": r.family, "tflops": t, "us": r.median_us, "winner": r.trial == leader}
        for r, t in ours
    ]
    rows += [
        {"kind": "peer", "label": peer_label(b.backend), "tflops": b.tflops, "us": b.median_us}
        for b in summary.baselines
        if b.tflops
    ]
    rows += [
        {"kind": "roof", "label": roof.name, "tflops": roof.tflops, "us": summary.flops / roof.tflops / 1e6}
        for roof in summary.roofs
    ]
    rows.sort(key=lambda row: -row["tflops"])
    most, least = rows[0]["tflops"], rows[-1]["tflops"] / 2
    for row in rows:
        row["width"] = 100 * math.log(row["tflops"] / least) / math.log(most / least)
        row["colour"] = colours[row["label"]] if row["kind"] == "kernel" else row["kind"]
    return rows
