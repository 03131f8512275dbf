"""The summary as one self-contained page: plotly.js inside, no network."""

from __future__ import annotations

import base64
import hashlib
import json

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evoattn.model.paths import REPORT_TEMPLATES
from evoattn.report.data import StudySummary, cost_text
from evoattn.timing.peers.labels import peer_label


def _inline_json(value: object) -> Markup:
    """JSON that no text in it can end: `<` only as its escape."""
    return Markup(json.dumps(value, ensure_ascii=True).replace("<", "\\u003c"))


def _source_hash(script: str) -> str:
    """What a Content-Security-Policy calls this script and no other."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def render_html(summary: StudySummary) -> str:
    """The page. All text of the database is escaped, and the page's policy runs its own two scripts only and loads
    nothing."""
    from plotly.offline import get_plotlyjs  # here, because a search that prints its table needs no plots

    from evoattn.report import plots

    figures = {"progress": plots.progress_figure(summary), "roofline": plots.roofline_figure(summary)}
    figures |= {f"importance-{n}": plots.importance_figure(i) for n, i in enumerate(summary.importances) if i.shares}
    environment = Environment(
        loader=FileSystemLoader(REPORT_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    library, script = get_plotlyjs(), (REPORT_TEMPLATES / "page.js").read_text()
    rows = summary.leaderboard
    return environment.get_template("page.html.j2").render(
        s=summary,
        measured=summary.kind == "measured",
        best=rows[0] if rows else None,
        cost=cost_text,
        peer=peer_label,
        genes=list(dict.fromkeys(name for row in rows for name in row.config)),
        backends=[b.backend for b in summary.baselines if any(b.backend in row.speedups for row in rows)],
        rival=next((b for b in summary.baselines if b.median_us is not None), None),
        drawn=len(plots.drawn_points(summary.progress)),
        style=Markup((REPORT_TEMPLATES / "page.css").read_text()),
        library=Markup(library),
        script=Markup(script),
        script_sources=Markup(f"{_source_hash(library)} {_source_hash(script)}"),
        figures=_inline_json({name: json.loads(figure.to_json()) for name, figure in figures.items() if figure}),
        shown=[name for name, figure in figures.items() if figure],
    )
