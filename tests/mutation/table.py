"""The table of mutants by family, and the survivors with their reasons."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from tests.mutation.verdicts import ANSWER, DEADLOCK, FAULT, REFUSED, SURVIVED, Verdict

REASONS = Path(__file__).with_name("reasons.yaml")


@dataclass(frozen=True)
class Reason:
    """Why mutants survive: all changes of a line, or those that `what` names. An equivalent one computes the same,
    whatever the shapes and the order of execution."""

    file: str
    line: str
    what: str
    equivalent: bool
    why: str
    family: str = ""
    """The one of which it is true; empty: all that have the file."""

    def fits(self, family: str, key: str) -> bool:
        file, line, kind, what = key.split(" | ", 3)
        like = line, re.sub(r" \(again \d+\)$", "", line)  # this one of like lines, or any
        here = self.line in like or (kind == "far move" and what.startswith(self.line))
        return file == self.file and here and self.what in what and self.family in ("", family)


def load_reasons(path: Path = REASONS) -> list[Reason]:
    """Raises `TypeError` on an entry of other words."""
    entries = yaml.safe_load(path.read_text()) or []
    return [Reason(**{"what": "", "equivalent": True} | entry) for entry in entries]


def reason_for(verdict: Verdict, reasons: Iterable[Reason]) -> Reason | None:
    return next((reason for reason in reasons if reason.fits(verdict.family, verdict.key)), None)


def load_verdicts(paths: Iterable[Path]) -> list[Verdict]:
    """Of several files the last word on each mutant of a family; where it was tried in other configs, that it was
    killed in some, be it on the lines of another variant: a line that several share may do nothing in one of them."""
    found: dict[tuple[str, str, str], Verdict] = {}
    for row in (json.loads(line) for path in paths for line in path.read_text().splitlines()):
        verdict = Verdict(**row)
        key = verdict.family, verdict.variant, verdict.key
        before = found.get(key)
        if before is None or (verdict.live and not before.killed):
            found[key] = verdict
    killed = {(one.family, one.key): one for one in found.values() if one.killed}
    return [
        replace(killed.get((one.family, one.key), one), variant=one.variant) if one.live else one
        for one in found.values()
    ]


def table(verdicts: Iterable[Verdict], reasons: Iterable[Reason]) -> str:
    """Markdown: a row per family, or per variant where mutants are of one, and one of all."""
    reasons = list(reasons)
    counts: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        if not verdict.live:
            continue
        found = reason_for(verdict, reasons) if verdict.verdict == SURVIVED else None
        word = "equivalent" if found and found.equivalent else verdict.verdict
        for name in (verdict.variant or verdict.family, "all"):
            counts.setdefault(name, Counter())[word] += 1
    words = (ANSWER, FAULT, DEADLOCK, REFUSED, "equivalent", SURVIVED)
    rows = ["| family | live | " + " | ".join(words) + " | killed of the rest |", "|---" * (len(words) + 3) + "|"]
    for family in sorted(counts, key=lambda name: (name == "all", name)):
        count = counts[family]
        rest = count.total() - count["equivalent"]
        share = f"{1 - count[SURVIVED] / rest:.1%}" if rest else "–"
        rows.append(f"| {family} | {count.total()} | " + " | ".join(str(count[w]) for w in words) + f" | {share} |")
    return "\n".join(rows)


def survivors(verdicts: Iterable[Verdict], reasons: Iterable[Reason]) -> list[tuple[Verdict, Reason | None]]:
    """Those that survived, with what is known of them."""
    reasons = list(reasons)
    return [(v, reason_for(v, reasons)) for v in verdicts if v.verdict == SURVIVED]
