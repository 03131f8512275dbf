"""The bench's rows for a terminal and as JSON."""

import json
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from evoattn.bench.row import Row, Time, shortened
from evoattn.peers.table import NOT_INSTALLED


def genes(config: dict[str, Any]) -> str:
    """A config in short: what is off is left out, what is on stands by its name alone."""
    return " ".join(
        name if value is True else f"{name}={value}" for name, value in config.items() if value is not False
    )


def _cell(time: Time | None) -> str:
    return "-" if time is None else f"{time.median_us:.2f} ({time.p10_us:.2f}-{time.p90_us:.2f})"


def render_rows(rows: list[Row], console: Console) -> None:
    """The table of times, then our kernels' genes, the peers' versions, and who refused what."""
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    title = "µs per call: median (10-90 %), interleaved in one run a problem"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("problem", overflow="fold")
    for name in ("ours", "TFLOP/s", *peers, "ours ÷ best peer"):
        table.add_column(name, justify="right")
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        speed = "-" if row.tflops is None else f"{row.tflops:.1f}"
        name = row.problem["name"] or row.describe
        table.add_row(Text(name), _cell(row.ours), speed, *(_cell(row.peers.get(peer)) for peer in peers), ratio)
    console.print(table)
    for name, text in dict.fromkeys(pair for row in rows for pair in row.versions.items()):
        console.print(f"{name}: {text}", markup=False)
    for row in rows:
        name = row.problem["name"] or row.describe
        if row.ours:
            console.print(f"{name}: trial {row.trial}, {row.family}: {genes(row.config)}", markup=False, soft_wrap=True)
        if weighed := {n: t.energy_mj for n, t in {"ours": row.ours, **row.peers}.items() if t and t.energy_mj}:
            energies = ", ".join(f"{who} {energy:.3g}" for who, energy in weighed.items())
            console.print(f"{name}: mJ per call of the whole board: {energies}", markup=False, soft_wrap=True)
        for note in row.notes:
            console.print(shortened(f"{name}: note: {note}"), markup=False, soft_wrap=True)
    refused: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for peer, reason in row.refusals.items():
            refused.setdefault((peer, reason), []).append(row.problem["name"] or row.describe)
    for (peer, reason), names in refused.items():
        where = "every problem" if len(names) == len(rows) else ", ".join(names)
        console.print(f"{peer} has no time for {where}: {reason}", markup=False, soft_wrap=True)
    if absent := sorted({peer for peer, reason in refused if NOT_INSTALLED in reason}):
        how = "python scripts/fetch_peers.py FOLDER, then set the PYTHONPATH that it prints."
        console.print(f"To bring {' and '.join(absent)}: {how}", markup=False, soft_wrap=True)


def rows_json(rows: list[Row]) -> str:
    """All fields of `Row` and its ratio, as a JSON list."""
    return json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=1, ensure_ascii=False) + "\n"
