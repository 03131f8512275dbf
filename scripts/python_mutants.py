"""Mutation tests: one small fault after another is planted in a module, and the tests of its room are to notice it.

    nice -n 15 python scripts/python_mutants.py [ROOM…] [--count 30] [--seed 0] [--list] [--only NUMBER…]

Rooms: search, finals, ranking, storage, samplers, benchmark, validate, report; all unless named. Of each room `--count`
mutants are drawn with `--seed`, the same ones each time; `--list` shows them, `--only` runs some of them. Prints a line
per mutant (killed, survived, or timeout, which counts as killed) and the share killed per room. Exit code 1 if a room
is under 85 %. Works on a copy of the tracked files. The survivors and their reasons are in docs/mutants_python.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from mutants.rooms import ROOMS, ROOT, sample
from mutants.runs import copy_tracked, preload, run_room

WANTED = 0.85


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=", ".join(ROOMS))
    parser.add_argument("--count", type=int, default=30, help="mutants per room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of mutants to run")
    words = parser.parse_args()
    if unknown := set(words.rooms) - set(ROOMS):
        parser.error(f"unknown room {unknown.pop()}; there are {', '.join(ROOMS)}")
    chosen = {
        room: [m for m in sample(room, words.count, words.seed) if not words.only or m.number in words.only]
        for room in words.rooms or ROOMS
    }
    if words.list:
        for room, mutants in chosen.items():
            for m in mutants:
                print(f"{room:10}{m.number:4} {m.file.relative_to(ROOT)}:{m.line}: {m.change}")
        return 0
    preload()
    with tempfile.TemporaryDirectory() as folder:
        copied = copy_tracked(Path(folder))
        shares = [run_room(room, mutants, copied) for room, mutants in chosen.items()]
    return 0 if min(shares) >= WANTED else 1


if __name__ == "__main__":  # tests spawn workers, which import this file again
    sys.exit(main())
