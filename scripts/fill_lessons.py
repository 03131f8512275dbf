#!/usr/bin/env python3
"""Write the numbers of studies into a page.

    python scripts/fill_lessons.py PAGE FOLDER

FOLDER has a STUDY.json for each study, of `evoattn report --format json`.

Beside PAGE.md it writes PAGE.jsonl: for each study its problem, its versions and the best trial, whole, since the
database stays where it was made.

A place in the page is `<!--EXPRESSION-->text<!---->`; the text is replaced, the expression stays, so that a page can be
filled again. With A and B the names of studies, or A.sdpa for the best SDPA backend in the final of study A (always µs,
medians):

    A          `12.34 µs (trial 56)` of the best kernel
    A.kib      its shared memory per block in KiB
    A / B      how many times the time of B fits into that of A
    A / B < 2  `yes` or `no`; also >
    A.kib < 48 likewise, of the shared memory of a block
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

PLACE = re.compile(r"<!--(.+?)-->.*?<!---->")
RATIO = re.compile(r"([\w.]+) / ([\w.]+)(?: ([<>]) ([\d.]+))?")
LIMIT = re.compile(r"(\w+)\.kib < ([\d.]+)")
SDPA = ("flash", "cudnn", "efficient", "math")


class Numbers:
    """The best trial of each study of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def best(self, study: str) -> dict[str, Any]:
        """The first row of its leaderboard. Raises `SystemExit` if the study is not there or timed nothing."""
        path = self.folder / f"{study}.json"
        rows = json.loads(path.read_text())["leaderboard"] if path.exists() else []
        if not rows or rows[0]["median_us"] is None:
            raise SystemExit(f"{path} has no timed kernel.")
        return rows[0]

    def microseconds(self, name: str) -> float:
        study, _, peer = name.partition(".")
        row = self.best(study)
        if not peer:
            return row["median_us"]
        speedups = [speedup for backend, speedup in row["speedups"].items() if backend in SDPA]
        if peer != "sdpa" or not speedups:
            raise SystemExit(f"Study {study} has no {peer} beside its best kernel.")
        return row["median_us"] * min(speedups)

    def text(self, expression: str) -> str:
        ratio = RATIO.fullmatch(expression)
        if ratio:
            first, second, relation, limit = ratio.groups()
            value = self.microseconds(first) / self.microseconds(second)
            if relation is None:
                return f"{value:.2f}"
            return "yes" if (value < float(limit)) == (relation == "<") else "no"
        if limited := LIMIT.fullmatch(expression):
            return "yes" if self.best(limited[1])["smem_bytes"] / 1024 < float(limited[2]) else "no"
        study, _, what = expression.partition(".")
        if what == "kib":
            return f"{self.best(study)['smem_bytes'] / 1024:.1f}"
        trial = f" (trial {self.best(study)['trial']})" if not what else ""
        return f"{self.microseconds(expression):.2f} µs{trial}"


def fill(page: str, numbers: Numbers) -> str:
    """The page with the text of every place written anew."""

    def place(match: re.Match[str]) -> str:
        return f"<!--{match[1]}-->{numbers.text(match[1])}<!---->"

    return PLACE.sub(place, page)


def record(page: str, numbers: Numbers) -> str:
    """A JSON line for each study that the page's commands make, in their order."""
    lines = []
    for study in re.findall(r"^evoattn search .*--study (\w+)$", page, re.MULTILINE):
        report = json.loads((numbers.folder / f"{study}.json").read_text())
        row = {key: report[key] for key in ("study", "problem_text", "versions", "created_at", "counts")} | {
            "best": numbers.best(study)
        }
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("folder", type=Path)
    words = parser.parse_args()
    path, found = words.page, Numbers(words.folder)
    page = fill(path.read_text(), found)
    path.write_text(page)
    path.with_suffix(".jsonl").write_text(record(page, found))


if __name__ == "__main__":
    main()
