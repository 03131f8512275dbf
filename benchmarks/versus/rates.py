"""Candidates per second of several runs.

    python -m benchmarks.versus.rates FOUND.json...

Counted from the first candidate to the last, and from the start of the tool's process to the last.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.versus import found
from benchmarks.versus.found import Found


def row(run: Found) -> str:
    """One run as a line."""
    if not run.tried:
        return f"{run.tool}: nothing was tried"
    times = [tried.at_s for tried in run.tried]
    failed = sum(tried.us is None for tried in run.tried)
    once_running = f"{run.per_second:.2f}" if run.per_second else "-"
    return (
        f"{run.tool}, {run.problem}: {len(times)} candidates ({failed} failed), the first after {min(times):.1f} s, "
        f"the last after {max(times):.1f} s; per second: {once_running} once running, "
        f"{len(times) / max(times):.2f} from its start"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("found", nargs="+", type=Path)
    for path in parser.parse_args().found:
        print(row(found.read(path)))


if __name__ == "__main__":
    main()
