"""Writes the tables of docs/results.md and reports/results_tables.md, and docs/results.svg, from docs/results.json.

    python -m scripts.results_page            # after an edit of the JSON
    python -m scripts.results_page BENCH.json --title T --date D --card C --commit H --command "evoattn bench …"

The second form first adds what `evoattn bench --format json` wrote, as one more run. Its table goes where a page has
the places `<!-- run: T -->` and `<!-- end -->`, and where it has `<!-- best of: T -->`, with the best peer alone. Times
are µs per call: the median, or median, 10th and 90th percentile; of the peers' the pages show the median alone.
With `--targets 0.97,0.7` a column says whether evoattn takes at most these shares of the best peer's time and of
FlexAttention's."""

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from evoattn.model.shape_text import lookup

DOCS = Path(__file__).resolve().parents[1] / "docs"
DATA, PICTURE = DOCS / "results.json", DOCS / "results.svg"
PAGES = DOCS / "results.md", DOCS.parent / "reports" / "results_tables.md"
PLACE = re.compile(r"(<!-- (run|best of): (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
PEERS = {
    "cudnn": "cuDNN",
    "fa3": "FlashAttention 3",
    "fa4": "FlashAttention 4",
    "flashinfer": "FlashInfer",
    "flash": "SDPA flash",
    "efficient": "SDPA efficient",
    "varlen": "varlen_attn",
    "flex": "FlexAttention",
}
"""The columns of the tables; other peers get one too where a run has them."""
SHORT_US = 90.0
"""Kernels faster than this are left out of the picture: see "Short kernels" on the page."""


def peer_us(row: dict[str, Any], name: str) -> float:
    """A peer's median."""
    time = row["peers"][name]
    return float(time[0] if isinstance(time, list) else time)


def best_peer(row: dict[str, Any]) -> tuple[str, float]:
    """The fastest peer of a row and its µs."""
    return min(((name, peer_us(row, name)) for name in row["peers"]), key=lambda item: item[1])


def shown(time: float | list[float]) -> str:
    """A median, with its spread where it is known."""
    if not isinstance(time, list):
        return f"{time:.2f}"
    median, *spread = time
    return f"{median:.2f} ({spread[0]:.2f} to {spread[1]:.2f})" if spread else f"{median:.2f}"


def verdict(row: dict[str, Any], targets: list[float]) -> list[str]:
    """(share of FlexAttention's time, whether both targets are met) as cells."""
    ours, flex = row["ours"][0], peer_us(row, PEERS["flex"]) if PEERS["flex"] in row["peers"] else None
    met = ours <= targets[0] * best_peer(row)[1] and (flex is None or ours <= targets[1] * flex)
    return [f"{ours / flex:.3f}" if flex else "-", "yes" if met else "no"]


def problem_text(row: dict[str, Any]) -> str:
    """The shape in words, e.g. `B=1 H=16 S=1024 D=64 fp16 full`."""
    problem = lookup(row["problem"])
    return problem.with_(dtype=row.get("dtype", problem.dtype)).describe()


def title(row: dict[str, Any]) -> str:
    """The problem's name, with its dtype where that is another than the name's."""
    return f"{row['problem']}, {row['dtype']}" if "dtype" in row else row["problem"]


def table(run: dict[str, Any]) -> str:
    """A run as Markdown: where and when it was made, then a line for each problem."""
    rows = run["rows"]
    present = dict.fromkeys(name for row in rows for name in row["peers"])
    peers = [name for name in dict.fromkeys((*PEERS.values(), *present)) if name in present]
    targets = run.get("targets")
    head = ["problem", "shape", "family", "evoattn, µs", *(f"{name}, µs" for name in peers), "÷ best peer"]
    head += ["÷ FlexAttention", f"≤ {targets[0]:g} and ≤ {targets[1]:g}"] if targets else []
    lines = [
        f"{run['card']}, {run['date']}, commit {run['commit']}, `{run['command']}`.",
        *textwrap.wrap(f"{run['versions']}.", 118),
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for row in rows:
        times = [f"{peer_us(row, name):.2f}" if name in row["peers"] else "-" for name in peers]
        ratios = [f"{row['ours'][0] / best_peer(row)[1]:.3f}", *(verdict(row, targets) if targets else [])]
        cells = [title(row), problem_text(row), row["family"], shown(row["ours"]), *times, *ratios]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def short_table(run: dict[str, Any]) -> str:
    """The same with the best peer alone, and the families' names left out."""
    lines = [
        f"{run['card']}, {run['date']}, commit {run['commit']}.\n",
        "| problem | shape | evoattn, µs | best peer, µs | ÷ best peer |\n|---|---|---|---|---|",
    ]
    for row in run["rows"]:
        name, time = best_peer(row)
        ours = row["ours"][0]
        cells = title(row), problem_text(row), f"{ours:.2f}", f"{time:.2f} {name}", f"{ours / time:.3f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def filled(page: str, runs: list[dict[str, Any]]) -> str:
    """The page with every table written anew. Raises `KeyError` for a place whose run does not exist."""
    by_title = {run["title"]: run for run in runs}
    made = {"run": table, "best of": short_table}
    return PLACE.sub(lambda match: f"{match[1]}{made[match[2]](by_title[match[3]])}{match[4]}", page)


def picture(run: dict[str, Any]) -> str:
    """A bar for each problem: how many times as fast as its fastest peer. Colours for a light and a dark ground."""
    rows = [row for row in run["rows"] if row["ours"][0] >= SHORT_US and "dtype" not in row]
    left, unit, step = 170, 330, 22
    width, height = 700, 56 + step * len(rows)
    ink = 'font-family="sans-serif" font-size="12" fill="#7d8590"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Speed of evoattn\'s best kernel over that of the fastest peer">',
        f'<text x="{left}" y="16" {ink}>times as fast as the fastest peer ({run["card"]}, {run["date"]})</text>',
    ]
    for number, row in enumerate(rows):
        y = 30 + step * number
        name, time = best_peer(row)
        speed = time / row["ours"][0]
        bar = unit * speed
        parts += [
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end" {ink}>{row["problem"]}</text>',
            f'<rect x="{left}" y="{y}" width="{bar:.1f}" height="16" rx="2" fill="#2da44e"/>',
            f'<text x="{left + bar + 6:.1f}" y="{y + 13}" {ink}>{speed:.2f}× {name}</text>',
        ]
    end = 30 + step * len(rows)
    parts += [
        f'<line x1="{left + unit}" y1="24" x2="{left + unit}" y2="{end}" stroke="#7d8590" stroke-dasharray="3 3"/>',
        f'<text x="{left + unit}" y="{end + 14}" text-anchor="middle" {ink}>1.0 = the fastest peer</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def spread_of(time: dict[str, float]) -> list[float]:
    """Median, 10th and 90th percentile."""
    return [round(time[key], 2) for key in ("median_us", "p10_us", "p90_us")]


def run_of_bench(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of `evoattn bench --format json` that have a time of ours and of a peer, as this page keeps them.

    Raises `ProblemError` for a problem without a name."""
    kept: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    for row in rows:
        if not row["ours"] or not row["peers"]:
            continue
        versions |= row["versions"]
        problem = lookup(row["problem"]["name"])
        dtype = {} if row["problem"]["dtype"] == problem.dtype else {"dtype": row["problem"]["dtype"]}
        ours = spread_of(row["ours"])
        peers = {PEERS.get(name, name): spread_of(time) for name, time in row["peers"].items()}
        kept.append({"problem": problem.name, **dtype, "family": row["family"], "ours": ours, "peers": peers})
    return {"versions": ", ".join(dict.fromkeys(versions.values())), "rows": kept}


def data_text(runs: list[dict[str, Any]]) -> str:
    """The JSON file, a line for each problem."""
    texts = []
    for run in runs:
        head = {key: value for key, value in run.items() if key != "rows"}
        rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in run["rows"])
        texts.append(f'{json.dumps(head, ensure_ascii=False, indent=1)[:-2]},\n "rows": [\n{rows}\n ]\n}}')
    return '{"runs": [\n' + ",\n".join(texts) + "\n]}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", nargs="?", type=Path)
    for name in ("title", "date", "card", "commit", "command"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--targets", help="the most shares of the best peer's time and of FlexAttention's")
    options = parser.parse_args()
    runs = json.loads(DATA.read_text())["runs"]
    if options.bench:
        about = {name: getattr(options, name) for name in ("title", "date", "card", "commit", "command")}
        runs = [run for run in runs if run["title"] != options.title]
        about |= {"targets": [float(share) for share in options.targets.split(",")]} if options.targets else {}
        runs.append(about | run_of_bench(json.loads(options.bench.read_text())))
        DATA.write_text(data_text(runs))
    for page in PAGES:
        page.write_text(filled(page.read_text(), runs))
    PICTURE.write_text(picture(runs[0]))


if __name__ == "__main__":
    main()
