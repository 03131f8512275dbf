"""Mutants of the templates: one small fault after another is planted in the CUDA, and the offline path (compile, the
interpreter's cases) is to find it.

    python scripts/mutants.py [FAMILY…] [--count 40] [--seed 0] [--out FILE.jsonl]    run a sample of each family
    python scripts/mutants.py --table FILE.jsonl…                                      print the table and survivors
    python scripts/mutants.py --again FILE.jsonl --seed 1 [--out FILE.jsonl]           survivors, in other configs

A mutant deletes, weakens or moves a synchronization, flips a condition or a parity, shifts an edge or a stage by one,
drops a term of an address, or takes meaning from a PTX instruction. It is live where the PTX of a launched kernel
differs; it runs in up to four configs, most of which have code on its line, chosen so that between them they have most
lines of the family. With `--out`, mutants that the file has are passed over, so that a long run may be done in pieces.
Survivors that are known, with the reason, are in scripts/template_mutants/reasons.yaml; the exit code is 1 if one is
not. Some 0.5 s of a core per mutant.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from pathlib import Path

import torch
from template_mutants.settings import Setting, settings_of
from template_mutants.sources import Mutant, mutants_of
from template_mutants.table import load_reasons, load_verdicts, survivors, table
from template_mutants.verdicts import SURVIVED, Verdict, judge, run_ptx

from evoattn.families.registry import FAMILIES

SETTINGS = 14
"""Configs per family."""


def sample(family: str, count: int, seed: int) -> list[Mutant]:
    """The same ones for the same seed and sources; a larger sample holds a smaller one."""
    mutants = sorted(mutants_of(family), key=lambda mutant: (mutant.key, mutant.change.first))
    random.Random(f"{family} {seed}").shuffle(mutants)
    return mutants[:count]


def sound(settings: list[Setting], seed: int) -> list[Setting]:
    """Those whose kernel is right as it is; says so of the others, which are false alarms."""
    kept = []
    for setting in settings:
        verdict, reason = run_ptx(setting, setting.ptx, seed)
        if verdict == SURVIVED:
            kept.append(setting)
        else:
            print(f"FALSE ALARM: {setting.family} {setting}: {reason}", flush=True)
    return kept


def run(
    family: str, mutants: list[Mutant], seed: int, settings_count: int, gpu: str | None, out: Path | None
) -> list[Verdict]:
    """Judge the mutants, add them to `out`, and print a line per mutant."""
    if not mutants:
        return []
    settings, found = sound(settings_of(family, settings_count, seed, gpu), seed), []
    for mutant in mutants:
        started = time.process_time()
        verdict = judge(mutant, settings, seed)
        found.append(verdict)
        print(f"{family:15}{verdict.verdict:16}{time.process_time() - started:5.1f} s  {mutant}", flush=True)
        if out:
            with out.open("a") as file:
                file.write(json.dumps(verdict.row()) + "\n")
    return found


def known_keys(path: Path | None, family: str) -> set[str]:
    """Of the family's mutants that the file has."""
    return {v.key for v in load_verdicts([path]) if v.family == family} if path and path.exists() else set()


def unexplained(paths: list[Path]) -> set[tuple[str, str]]:
    """(family, key) of the survivors in these files that have no known reason."""
    verdicts = load_verdicts(paths)
    return {(v.family, v.key) for v, reason in survivors(verdicts, load_reasons()) if reason is None}


def show(verdicts: list[Verdict]) -> int:
    """Print the table and the survivors; 1 if one has no known reason."""
    reasons, unknown = load_reasons(), 0
    print(table(verdicts, reasons))
    for verdict, reason in survivors(verdicts, reasons):
        if reason is None:
            unknown += 1
            print(f"\nUNKNOWN {verdict.family}: {verdict.place}\n    {Setting.from_row(verdict.setting)}")
        elif not reason.equivalent:
            print(f"\nsurvivor {verdict.family}: {verdict.place}\n    {reason.why}")
    return int(bool(unknown))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(sorted(FAMILIES)))
    parser.add_argument("--count", type=int, default=40, help="mutants per family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", type=int, default=SETTINGS, help="configs per family")
    parser.add_argument("--match", default="", help="only mutants whose description this matches")
    parser.add_argument("--gpu", choices=("h100", "l4"), help="only configs for this one; either, unless given")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    parser.add_argument("--out", type=Path, help="verdicts are added to this file, one JSON object per line")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the table of these, run nothing")
    parser.add_argument(
        "--again", type=Path, nargs="+", metavar="FILE", help="the survivors in these, whatever --count"
    )
    words = parser.parse_args()
    if words.table:
        return show(load_verdicts(words.table))
    if unknown := set(words.families) - set(FAMILIES):
        parser.error(f"unknown family {unknown.pop()}; there are {', '.join(sorted(FAMILIES))}")
    torch.set_num_threads(1)
    found = []
    for family in words.families or sorted(FAMILIES):
        mutants = [m for m in sample(family, len(mutants_of(family)), words.seed) if re.search(words.match, str(m))]
        if words.again:
            mutants = [m for m in mutants if (family, m.key) in unexplained(words.again)]
        else:
            known = known_keys(words.out, family)
            mutants = [m for m in mutants[: words.count] if m.key not in known]
        if words.list:
            print(*(f"{family:15}{mutant}" for mutant in mutants), sep="\n")
            continue
        found += run(family, mutants, words.seed, words.settings, words.gpu, words.out)
    return 0 if words.list else show(found)


if __name__ == "__main__":
    sys.exit(main())
