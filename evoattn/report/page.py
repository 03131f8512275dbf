"""A study as one HTML page: its figures and its tables."""

import base64
import hashlib
import json
import math
import shlex
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evoattn.families.registry import load_space
from evoattn.model.errors import WrongUse
from evoattn.model.gpu import lookup
from evoattn.model.paths import REPORT_TEMPLATES
from evoattn.model.space import spelling
from evoattn.peers.labels import peer_label
from evoattn.report.data import FamilySample, GeneValue, LeaderboardRow, StudySummary, Winner
from evoattn.report.instructions import CLASSES, Counts, count_instructions
from evoattn.report.table import Comparison
from evoattn.report.text import command, cost_text

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
        "winner": summary.winner.row.trial if summary.winner else None,
        "meanings": meanings(summary),
        "notes": {i.family: i.why_not for i in summary.importances},
    }


def meanings(summary: StudySummary) -> dict[str, str]:
    """What each parameter of the study's families means, as `evoattn families NAME` says it; none of a family or a GPU
    that this version does not know."""
    found: dict[str, str] = {}
    for family in summary.families:
        try:
            space = load_space(family, lookup(summary.gpu))
        except WrongUse:
            continue
        found |= {parameter.name: parameter.meaning for parameter in space.parameters}
    return found


CONTENTS = {
    "winner": "Best kernel",
    "course": "Progress",
    "families": "Families",
    "leaderboard": "Leaderboard",
    "parameters": "Parameters",
    "ancestors": "Lineage",
    "roofline": "Roofline",
    "peers": "Peers",
    "failures": "Failures",
}
"""Sections of the page by their places."""


def _progress(summary: StudySummary) -> dict[str, Any]:
    p = summary.progress
    drawn, improved = p.drawn(), set(p.improvements)
    low, high = _value_range(summary)
    names: dict[str, list[str]] = {}
    for i in drawn:
        known = names.setdefault(p.family[i], [])
        known += [name for name in p.configs[p.trial[i]] if name not in known]
    configs = [[p.configs[p.trial[i]].get(name) for name in names[p.family[i]]] for i in drawn]
    peers = [(b.backend, b.median_us) for b in summary.baselines if b.median_us is not None and b.median_us <= high]
    return {
        "trial": [p.trial[i] for i in drawn],
        "seconds": [round(p.elapsed_s[i], 3) for i in drawn],
        "family": [p.family[i] for i in drawn],
        "value": [p.value[i] for i in drawn],
        "names": names,
        "config": [[value if value is None else spelling(value) for value in row] for row in configs],
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

    `width` is the length of a bar in per cent on a logarithmic scale, which begins at half of the least."""
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


SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js", "figures.js", "parameters.js", "page.js")


def _inline_json(value: object) -> Markup:
    """JSON that no text in it can end: `<` only as its escape."""
    return Markup(json.dumps(value, ensure_ascii=True, separators=(",", ":")).replace("<", "\\u003c"))


def _source_hash(script: str) -> str:
    """What a Content-Security-Policy calls this script and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _commands(winner: Winner, db: str | None) -> list[tuple[str, str]]:
    """What to do with the winner, and the command for it; `db` is the value of --db, None where none is needed."""
    trial, place = str(winner.row.trial), ["--db", db] if db else []
    return [
        ("export", shlex.join(["evoattn", "export", trial, *place, "-o", "kernel.cu"])),
        ("check again", shlex.join(["evoattn", "reproduce", trial, *place])),
        ("all that is recorded", shlex.join(["evoattn", "show", trial, *place])),
    ]


def _config_text(winner: Winner) -> str:
    """The config as options of `evoattn search`, on lines that a shell joins."""
    settings = [["--set", f"{name}={value}"] for name, value in winner.settings.items()]
    return "\n".join(command([["--family", winner.row.family], *settings], width=1, indent=""))


def render_html(
    summary: StudySummary, db: str | None = None, count: Callable[[str, str], Counts | str] = count_instructions
) -> str:
    """The page. All text of the database is escaped, and the page's policy runs its own scripts only and loads nothing.

    `db` is the value of --db for the commands on the page, None where they need none. `count` takes the winner's source
    and architecture and gives its instructions, or says why not."""
    environment = Environment(
        loader=FileSystemLoader(REPORT_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    measured, rows, winner = summary.kind == "measured", summary.leaderboard, summary.winner
    scripts = [(REPORT_TEMPLATES / name).read_text(encoding="utf-8") for name in SCRIPTS]
    drawn = figures(summary)
    instructions = count(winner.source, summary.arch) if winner else {}
    counted = {} if isinstance(instructions, str) else instructions

    missing = {
        *(["roofline"] if not ceilings(summary) else []),
        *(["peers"] if not summary.baselines else []),
        *(["failures"] if not summary.failures else []),
    }

    def worth(row: LeaderboardRow) -> float | None:
        return row.median_us if measured else row.relative_cost

    def value_text(value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:.2f}" if measured else cost_text(value)

    return environment.get_template("page.html.j2").render(
        s=summary,
        measured=measured,
        unit="median µs" if measured else "relative cost",
        worth=worth,
        value_text=value_text,
        setting=spelling,
        peer=peer_label,
        colours=family_colours(summary),
        contents=[(place, name) for place, name in CONTENTS.items() if place not in missing],
        meanings=drawn["meanings"],
        genes=list(dict.fromkeys(name for row in rows for name in row.config)),
        backends=[b.backend for b in summary.baselines if any(b.backend in row.speedups for row in rows)],
        telling=[gene for gene in summary.genes if gene.tells],
        commands=_commands(winner, db) if winner else [],
        config_text=_config_text(winner) if winner else "",
        instructions=instructions,
        classes=[name for name, _ in CLASSES if any(name in counts for counts in counted.values())],
        most_instructions=max((n for counts in counted.values() for n in counts.values()), default=1),
        ceilings=ceilings(summary),
        drawn=len(drawn["progress"]["trial"]),
        figures_json=_inline_json(drawn),
        style=Markup((REPORT_TEMPLATES / "page.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        script_sources=Markup(" ".join(map(_source_hash, scripts))),
    )


def comparison_html(found: Comparison) -> str:
    """Two studies side by side as a page that loads nothing and runs nothing."""
    environment = Environment(loader=FileSystemLoader(REPORT_TEMPLATES), autoescape=True, undefined=StrictUndefined)
    style = Markup((REPORT_TEMPLATES / "page.css").read_text(encoding="utf-8"))
    return environment.get_template("compare.html.j2").render(found=found, style=style)
