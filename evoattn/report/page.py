"""The summary as one page that holds all it needs: data, scripts and styles; it loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Callable

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evoattn.model.paths import REPORT_TEMPLATES
from evoattn.model.space import spelling
from evoattn.report.data import StudySummary
from evoattn.report.figures import ceilings, family_colours, figures
from evoattn.report.instructions import CLASSES, Counts, count_instructions
from evoattn.report.rows import LeaderboardRow, Winner
from evoattn.report.text import command, cost_text
from evoattn.timing.peers.labels import peer_label

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
    summary: StudySummary,
    db: str | None = None,
    count: Callable[[str, str], Counts | str] = count_instructions,
) -> str:
    """The page. All text of the database is escaped, and the page's policy runs its own scripts only and loads nothing.

    `db` is the value of --db for the commands on the page, None where they need none. `count` takes the winner's source
    and architecture and gives its instructions, or says why not.
    """
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
