"""The rooms of the Python that mutants are planted in, and the tests that are to notice them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from mutants.faults import mutants_of

ROOT = Path(__file__).resolve().parents[2]
FINAL_TESTS = (
    "tests/search/test_finals.py::test_the_best_starting_config_takes_part_in_the_final",
    "tests/search/test_finals.py::test_a_finalist_that_kills_the_worker_leaves_the_final_and_the_leaderboard",
)


@dataclass(frozen=True)
class Room:
    """Files under `evoattn/`, and the tests that are to notice a fault in them."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "search": Room(
        ("search/loop.py", "search/device.py", "search/recorder.py", "search/candidates.py"), ("tests/search",)
    ),
    "finals": Room(
        ("search/finals.py", "search/finalists.py"),
        ("tests/search/test_finalists.py", "tests/cheats/test_contest.py", *FINAL_TESTS),
    ),
    "ranking": Room(("timing/ranking.py",), ("tests/timing/test_ranking.py",)),
    "storage": Room(("storage/*.py",), ("tests/storage",)),
    "samplers": Room(("samplers/*.py",), ("tests/samplers",)),
    "benchmark": Room(
        ("timing/benchmark.py",),
        (
            "tests/timing/test_benchmark.py",
            "tests/timing/test_timer.py",
            "tests/cheats/test_timed_path.py",
            "tests/cheats/test_other_outputs.py",
        ),
    ),
    "validate": Room(
        ("correctness/validate.py", "correctness/judge.py", "correctness/cases.py", "correctness/interpreter_cases.py"),
        (
            "tests/correctness/test_validate.py",
            "tests/correctness/test_cases.py",
            "tests/cheats/test_timed_path.py",
            "tests/cheats/test_other_outputs.py",
        ),
    ),
    "report": Room(
        (
            "report/summary.py",
            "report/analysis.py",
            "report/data.py",
            "report/winner.py",
        ),
        ("tests/report",),
    ),
}


@dataclass(frozen=True)
class Mutant:
    """`number` within its room; `change` says what was done at `line` of `file`."""

    number: int
    file: Path
    line: int
    change: str
    source: str


def sample(room: str, count: int, seed: int) -> list[Mutant]:
    """The room's mutants, the same ones for the same count, seed and sources."""
    paths = sorted(path for pattern in ROOMS[room].files for path in (ROOT / "evoattn").glob(pattern))
    every = [(path, *mutant) for path in paths for mutant in mutants_of(path)]
    chosen = random.Random(f"{room} {seed}").sample(every, min(count, len(every)))
    chosen.sort(key=lambda mutant: mutant[:2])
    return [Mutant(n, path, line, change, source) for n, (path, line, change, source) in enumerate(chosen, 1)]
