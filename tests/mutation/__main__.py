"""Mutants of the templates: one small fault after another is planted in the CUDA, and the offline path (compile, the
interpreter's cases) is to find it.

    python -m tests.mutation [FAMILY…] [--count 40] [--seed 0] [--jobs 2] [--out FILE.jsonl]    run a sample of each
    python -m tests.mutation --table FILE.jsonl…                                 print the table and survivors
    python -m tests.mutation --variant [NAME…] [--family FAMILY…] …              on the lines of variants (variants.py)
    python -m tests.mutation --again FILE.jsonl --seed 1 [--out FILE.jsonl]      survivors, in other configs
    python -m tests.mutation --python [ROOM…] [--list] [--again FILE.jsonl]      of evoattn's own Python

A mutant deletes, weakens or moves a synchronization, flips a condition or a parity, shifts an edge or a stage by one,
drops a term of an address, takes meaning from a PTX instruction, exchanges names or operands, changes a constant, an
operator, a shuffle or a loop, leaves out an assignment, a factor or a part of a condition, does a statement twice or
too late, negates a condition, takes another function, other bits or a coarser number. It is live where the PTX of a
launched kernel differs; it runs in up to four configs, most of which have code on its line, and in others in which it
lengthens code where it shortened it before. Between them the configs have most lines of the family. With `--out`,
mutants that the file has are passed over, so that a long run may be done in pieces. Survivors that are known, with the
reason, are in tests/mutation/reasons.yaml; the exit code is 1 if one is not. Some 0.5 s of a core per mutant.

With `--python` the tests of a room (`rooms.ROOMS`) are to notice the faults: those of above, a keyword
argument or a part of a key left out, and a name in place of its neighbour's. A line per mutant (killed, survived, or
timeout, which counts as killed) and the share killed per room; the exit code is 1 if a room is under 85 %. Works on a
copy of the tracked files, at best under `nice -n 15`."""

import argparse
import json
import math
import random
import re
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from evoattn.families.registry import FAMILIES
from evoattn.model.space import ConfigError
from tests.mutation import python_mutants, variants
from tests.mutation.rooms import ROOMS
from tests.mutation.settings import Setting, drawn_settings, with_lines, with_most_lines
from tests.mutation.sources import Mutant, in_turn, mutants_of
from tests.mutation.variants import VARIANTS, serving
from tests.mutation.verdicts import SURVIVED, Verdict, judge, load_reasons, load_verdicts, run_ptx, survivors, table
from tests.support.in_processes import in_processes

SETTINGS = 14
"""Configs per family."""


def sample(family: str, count: int, seed: int) -> list[Mutant]:
    """The kinds of change in turn. The same ones for the same seed and sources; a larger sample holds a smaller one."""
    return in_turn(mutants_of(family), f"{family} {seed}")[:count]


def _is_sound(setting: Setting, seed: int) -> bool:
    """Whether a setting's kernel as it is passes; if not, that is told: a false alarm."""
    verdict, reason = run_ptx(setting, setting.ptx, seed)
    if verdict != SURVIVED:
        print(f"FALSE ALARM: {setting.family} {setting}: {reason}", flush=True)
    return verdict == SURVIVED


def sound_settings(family: str, seed: int, count: int) -> list[Setting]:
    """The settings in which its mutants are judged."""
    drawn = [with_lines(setting) for setting in drawn_settings(family, count, seed)]
    chosen = with_most_lines(sorted(drawn, key=lambda setting: str(setting.row())), count)
    return [setting for setting in sorted(chosen, key=lambda setting: str(setting.row())) if _is_sound(setting, seed)]


def judged(
    mutants: Sequence[Mutant], settings: list[Setting], seed: int, out: Path | None, variant: str = ""
) -> list[Verdict]:
    """Verdicts on mutants of a family, on lines of a variant, each printed and added to `out` as it comes: a run that
    is cut off has what it did."""
    found = []
    for mutant in mutants if settings else ():
        started = time.process_time()
        found.append(verdict := replace(judge(mutant, settings, seed), variant=variant))
        seconds = time.process_time() - started
        print(f"{verdict.family:15}{verdict.verdict:16}{seconds:5.1f} s  {verdict.place}", flush=True)
        if out:
            with out.open("a") as file:
                file.write(json.dumps(verdict.row()) + "\n")
    return found


def run(
    mutants: Mapping[str, Sequence[Mutant]], seed: int, settings: int, jobs: int, out: Path | None
) -> list[Verdict]:
    """Judge the mutants, print a line for each, and add verdicts to `out` as they come: a process takes a family."""
    families = [family for family in mutants if mutants[family]]
    random.Random(seed).shuffle(families)
    call = partial(_of_family, seed=seed, settings=settings, out=out)
    found = in_processes(jobs, call, [(family, mutants[family]) for family in families])
    return [verdict for verdicts in found for verdict in verdicts]


def _of_family(of: tuple[str, Sequence[Mutant]], seed: int, settings: int, out: Path | None) -> list[Verdict]:
    family, mutants = of
    return judged(mutants, sound_settings(family, seed, settings), seed, out)


def _share(variant: str, count: int) -> int:
    """How many of a variant's mutants are of each family that serves it."""
    return math.ceil(count / len(serving(variant)))


def _prepared(
    pair: tuple[str, str], known: Collection[str], words: argparse.Namespace
) -> tuple[list[Setting], list[Mutant]]:
    """Of a variant and a family: settings that have it and are right, and the mutants of the variant's lines but for
    those of `known` keys."""
    variant, family = pair
    drawn = variants.settings_of(family, variant, words.settings, words.seed)
    sound = [setting for setting in drawn if _is_sound(setting, words.seed)]
    chosen: list[Mutant]
    if words.again:
        left = {key for of_variant, of_family, key in unexplained(words.again) if (of_variant, of_family) == pair}
        chosen = [mutant for mutant in mutants_of(family) if mutant.key in left]
    else:
        lines = frozenset(line for setting in sound for line in variants.own_lines(setting, variant))
        chosen = [*variants.mutants_on(family, lines, f"{family} {variant} {words.seed}")]
        chosen = chosen[: _share(variant, words.count)]
    return sound, [m for m in chosen if re.search(words.match, str(m)) and m.key not in known]


def _of_pair(of: tuple[tuple[str, str], Collection[str]], words: argparse.Namespace) -> list[Verdict]:
    """Verdicts on the mutants of a variant and a family."""
    settings, mutants = _prepared(*of, words)
    if not words.list:
        return judged(mutants, settings, words.seed, words.out, of[0][0])
    listed({", ".join(of[0]): mutants})
    return []


def run_variants(words: argparse.Namespace) -> list[Verdict]:
    """Judge mutants on the lines of each variant, in settings that have it: a process takes a variant and a family."""
    pairs = [
        (variant, family)
        for variant in words.names or VARIANTS
        for family in serving(variant)
        if family in (words.family or FAMILIES)
    ]
    if words.again:
        survived = {(variant, family) for variant, family, _ in unexplained(words.again)}
        pairs = [pair for pair in pairs if pair in survived]
    random.Random(words.seed).shuffle(pairs)  # of a run that is cut off, all variants have some
    known = [set() if words.again else known_keys(words.out, family, variant) for variant, family in pairs]
    left = [(pair, keys) for pair, keys in zip(pairs, known) if len(keys) < _share(pair[0], words.count)]
    for family in {family for (_, family), _ in left}:
        mutants_of(family)  # once, for all processes
    found = in_processes(words.jobs, partial(_of_pair, words=words), left)
    return [verdict for verdicts in found for verdict in verdicts]


def known_keys(path: Path | None, family: str, variant: str = "") -> set[str]:
    """Of the family's mutants, on the lines of a variant, that the file has."""
    known = load_verdicts([path]) if path and path.exists() else []
    return {v.key for v in known if (v.family, v.variant) == (family, variant)}


def unexplained(paths: list[Path]) -> set[tuple[str, str, str]]:
    """(variant, family, key) of the survivors in these files that have no known reason."""
    verdicts = load_verdicts(paths)
    return {(v.variant, v.family, v.key) for v, reason in survivors(verdicts, load_reasons()) if reason is None}


def show(verdicts: list[Verdict]) -> int:
    """Print the table and the survivors; 1 if one has no known reason."""
    reasons, unknown = load_reasons(), 0
    print(table(verdicts, reasons))
    for verdict, reason in survivors(verdicts, reasons):
        if reason is None:
            unknown += 1
            print(f"\nUNKNOWN {verdict.family}: {verdict.place}\n    {_described(verdict)}")
        elif not reason.equivalent:
            print(f"\nsurvivor {verdict.family}: {verdict.place}\n    {reason.why}")
    return int(bool(unknown))


def _described(verdict: Verdict) -> str:
    """The setting; its words as they were, if today's spaces lack such a config."""
    try:
        return str(Setting.from_row(verdict.setting))
    except ConfigError as error:
        return f"{verdict.setting} ({error})"


def listed(chosen: Mapping[str, Sequence[object]]) -> int:
    """Print the mutants by family or room."""
    print(*(f"{name:15}{mutant}" for name, mutants in chosen.items() for mutant in mutants), sep="\n")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="FAMILY", help=", ".join(sorted(FAMILIES)))
    parser.add_argument("--count", type=int, default=40, help="mutants per family or room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--settings", type=int, default=SETTINGS, help="configs per family")
    parser.add_argument("--match", default="", help="only mutants whose description this matches")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--variant", action="store_true", help="on the lines of variants; names are those of variants")
    parser.add_argument("--family", nargs="+", choices=sorted(FAMILIES), help="with --variant: only these")
    parser.add_argument("--python", action="store_true", help="faults in evoattn's own Python, run by its tests")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    parser.add_argument("--out", type=Path, help="verdicts are added to this file, one JSON object per line")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print the table of these, run nothing")
    parser.add_argument(
        "--again", type=Path, nargs="+", metavar="FILE", help="the survivors in these, whatever --count"
    )
    words = parser.parse_args()
    if words.table:
        return show(load_verdicts(words.table))
    known_names: Collection[str] = ROOMS if words.python else VARIANTS if words.variant else sorted(FAMILIES)
    if unknown := set(words.names) - set(known_names):
        parser.error(f"unknown name {unknown.pop()}; there are {', '.join(known_names)}")
    names = words.names or known_names
    if words.python:
        left = python_mutants.survivors_of(words.again) if words.again else None
        drawn = left or {room: python_mutants.sample(room, words.count, words.seed) for room in names}
        names = [room for room in names if room in drawn]
        wanted = {room: drawn[room] for room in names}
        return listed(wanted) if words.list else python_mutants.run(wanted, words.jobs, words.out)
    if words.variant:
        found = run_variants(words)
        return 0 if words.list else show(found)
    chosen, survived = {}, unexplained(words.again or [])
    for family in names:
        mutants = [m for m in sample(family, sys.maxsize, words.seed) if re.search(words.match, str(m))]
        if words.again:
            chosen[family] = [m for m in mutants if ("", family, m.key) in survived]
        else:
            known = known_keys(words.out, family)
            chosen[family] = [m for m in mutants[: words.count] if m.key not in known]
    if words.list:
        return listed(chosen)
    return show(run(chosen, words.seed, words.settings, words.jobs, words.out))


if __name__ == "__main__":  # tests of --python spawn workers, which import this file again
    sys.exit(main())
