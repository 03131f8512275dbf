"""The page's figures: progress of the search, importance of the parameters, roofline."""

from __future__ import annotations

import math
from html import escape

import plotly.graph_objects as go

from evoattn.report.data import StudySummary
from evoattn.report.rows import Importance, Progress
from evoattn.timing.peers.labels import peer_label

MAX_POINTS = 1500
"""Candidates drawn in the progress plot: each is a node of the page, and more of them only cover each other."""
COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#ec4899", "#8b5cf6", "#84cc16", "#ef4444")
DASHES = ("solid", "solid", "dash", "dashdot", "dot")
"""Roofs that coincide (at head_dim 64 a Hopper's exponentials take as long as its products) still show both."""
GREY = "#8b93a1"
LEGEND = {"orientation": "h", "x": 0, "y": -0.18, "yanchor": "top"}
FONT = "ui-sans-serif, system-ui, sans-serif"


def _figure(height: int, **layout) -> go.Figure:
    """An empty figure; text, grid and background take the page's colours there (light or dark)."""
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 70, "r": 30, "t": 30, "b": 60},
        font={"family": FONT, "size": 13},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": GREY},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hoverlabel={"font": {"family": FONT}},
        **layout,
    )
    return figure


def drawn_points(progress: Progress) -> list[int]:
    """Indices of the candidates to draw: all improvements, and of the others an even sample that keeps to `MAX_POINTS`."""
    count = len(progress.value)
    stride = max(1, -(-count // MAX_POINTS))
    return sorted({*range(0, count, stride), *progress.improvements})


def _value_range(summary: StudySummary) -> tuple[float, float]:
    """What the progress plot shows at first: all improvements and nine tenths of the candidates; a few are far slower."""
    p = summary.progress
    ordered = sorted(p.value)
    most = max(ordered[len(ordered) * 9 // 10], p.value[p.improvements[0]])
    least = min([ordered[0], *(b.median_us for b in summary.baselines if b.median_us is not None)])
    return max(least * 0.9, most * 1e-6), most * 1.15


def progress_figure(summary: StudySummary) -> go.Figure | None:
    """Candidates and the best so far, against the trial's number or the elapsed time (two buttons); None without a right trial."""
    p = summary.progress
    if not p.value:
        return None
    measured = summary.kind == "measured"
    figure = _figure(430, legend=LEGEND)
    drawn, hours = drawn_points(p), p.elapsed_s[-1] > 2 * 3600
    seconds_a_unit, unit = (3600, "h") if hours else (60, "min")
    elapsed = [s / seconds_a_unit for s in p.elapsed_s]
    for by_time, xs in ((False, p.trial), (True, elapsed)):
        figure.add_scatter(
            x=[xs[i] for i in drawn],
            y=[p.value[i] for i in drawn],
            mode="markers",
            name="right candidates",
            visible=not by_time,
            marker={"size": 5, "color": GREY, "opacity": 0.45},
            customdata=[p.trial[i] for i in drawn],
            hovertemplate="trial %{customdata}<br>%{y:.5g}" + (" µs" if measured else "") + "<extra></extra>",
        )
        steps = [*p.improvements, len(p.value) - 1]
        best = [p.value[i] for i in p.improvements]
        figure.add_scatter(
            x=[xs[i] for i in steps],
            y=[*best, best[-1]],
            mode="lines+markers",
            name="best so far",
            visible=not by_time,
            line={"shape": "hv", "color": COLOURS[0], "width": 2.5},
            marker={"size": 6},
            customdata=[p.trial[i] for i in steps],
            hovertemplate="best at trial %{customdata}<br>%{y:.5g}" + (" µs" if measured else "") + "<extra></extra>",
        )
    low, high = _value_range(summary)
    for n, baseline in enumerate(b for b in summary.baselines if b.median_us is not None and b.median_us <= high):
        colour = COLOURS[1 + n % (len(COLOURS) - 1)]
        figure.add_shape(
            type="line",
            xref="paper",
            x0=0,
            x1=1,
            y0=baseline.median_us,
            y1=baseline.median_us,
            line={"dash": "dot", "width": 1.5, "color": colour},
        )
        figure.add_annotation(  # on a log axis a shape takes the value and a text its logarithm
            xref="paper",
            x=1,
            xanchor="right",
            y=math.log10(baseline.median_us),
            yanchor="bottom",
            showarrow=False,
            text=f"{escape(peer_label(baseline.backend))} {baseline.median_us:.2f} µs",
            font={"size": 11, "color": colour},
        )
    figure.update_xaxes(title="trial")
    title = "median, µs a call" if measured else "relative cost (no time)"
    figure.update_yaxes(
        title=title, type="log", exponentformat="none", range=[math.log10(low), math.log10(high)], automargin=True
    )
    buttons = [
        {"label": label, "method": "update", "args": [{"visible": visible}, {"xaxis.title.text": title}]}
        for label, title, visible in (
            ("by trial", "trial", [True, True, False, False]),
            ("by time", f"time since the study was made, {unit}", [False, False, True, True]),
        )
    ]
    figure.update_layout(
        updatemenus=[
            {
                "type": "buttons",
                "direction": "right",
                "x": 0,
                "xanchor": "left",
                "y": 1.06,
                "yanchor": "bottom",
                "buttons": buttons,
                "showactive": False,
            }
        ]
    )
    return figure


def importance_figure(importance: Importance) -> go.Figure:
    """Bars, the largest share on top."""
    names = list(importance.shares)[::-1]
    figure = _figure(90 + 26 * len(names))
    figure.add_bar(
        x=[importance.shares[n] for n in names],
        y=[escape(n) for n in names],
        orientation="h",
        marker={"color": COLOURS[0]},
        hovertemplate="%{y}: %{x:.1%}<extra></extra>",
    )
    figure.update_xaxes(title="share of what sets the best tenth apart", tickformat=".0%", rangemode="tozero")
    figure.update_yaxes(automargin=True)
    return figure


def roofline_figure(summary: StudySummary) -> go.Figure | None:
    """TFLOP/s against the problem's FLOP a byte: the GPU's roofs, the leaderboard and the peers; None if nothing was timed."""
    rows = [row for row in summary.leaderboard if row.tflops]
    if not rows or not summary.roofs:
        return None
    intensity = summary.flops / summary.bytes
    figure = _figure(520, showlegend=True, legend=LEGEND)
    left, right = intensity / 30, intensity * 30
    top = max(roof.tflops for roof in summary.roofs if roof.gb_per_s is None)
    for n, roof in enumerate(summary.roofs):
        colour = COLOURS[(n + 2) % len(COLOURS)]
        if roof.gb_per_s is not None:
            ridge = top * 1e3 / roof.gb_per_s
            xs, name = [min(left, ridge / 2), ridge], f"{roof.name} {roof.gb_per_s:.0f} GB/s"
            ys = [x * roof.gb_per_s / 1e3 for x in xs]
            left, right = xs[0], max(right, ridge * 2)
        else:
            xs, ys, name = [left, right], [roof.tflops] * 2, f"{roof.name} {roof.tflops:.0f} TFLOP/s"
        figure.add_scatter(
            x=xs,
            y=ys,
            mode="lines",
            name=name,
            line={"color": colour, "width": 2, "dash": DASHES[n % len(DASHES)]},
            hovertemplate=f"{name}<extra></extra>",
        )
    for n, family in enumerate(dict.fromkeys(row.family for row in rows)):
        ours = [row for row in rows if row.family == family]
        figure.add_scatter(
            x=[intensity] * len(ours),
            y=[row.tflops for row in ours],
            mode="markers+text",
            name=escape(family),
            marker={"size": 9, "color": COLOURS[n % 2], "line": {"width": 1, "color": "#fff"}},
            textposition="middle left",
            text=[f"trial {row.trial}  " if row.rank == 1 else "" for row in ours],
            customdata=[[row.trial, row.median_us] for row in ours],
            hovertemplate="trial %{customdata[0]}: %{customdata[1]:.2f} µs, %{y:.1f} TFLOP/s<extra></extra>",
        )
    timed = [b for b in summary.baselines if b.tflops]
    figure.add_scatter(
        x=[intensity] * len(timed),
        y=[b.tflops for b in timed],
        mode="markers+text",
        name="peers",
        textposition="middle right",
        text=[f"  {escape(peer_label(b.backend))}" for b in timed],
        marker={"size": 10, "symbol": "diamond", "color": COLOURS[6]},
        customdata=[b.median_us for b in timed],
        hovertemplate="%{text}: %{customdata:.2f} µs, %{y:.1f} TFLOP/s<extra></extra>",
    )
    figure.update_xaxes(title="FLOP a byte of Q, K, V and O", type="log", exponentformat="none", dtick=1)
    figure.update_yaxes(title="TFLOP/s", type="log", exponentformat="none", dtick=1)
    return figure
