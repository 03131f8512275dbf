"""Faults in evoattn's own Python: a room's mutants, and runs of its tests on a copy of the sources for each."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from evoattn.model.paths import ROOT
from tests.mutation.python_faults import mutants_of

WANTED = 0.85
"""The share of a room's mutants that its tests are to notice."""
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
    "search": Room(("search/*.py",), ("tests/search",)),
    "finals": Room(
        ("engine/finals.py", "search/finalists.py"),
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
    "ops": Room(("ops/*.py",), ("tests/ops",)),
    "portfolio": Room(("portfolio/*.py",), ("tests/portfolio",)),
    "integrations": Room(("integrations/*.py",), ("tests/integrations",)),
    "timing": Room(("timing/*.py",), ("tests/timing", "tests/cheats")),
    "cost": Room(("cost/*.py",), ("tests/cost",)),
    "model": Room(("model/*.py",), ("tests/model", "tests/test_problem.py")),
    "export": Room(("export/*.py",), ("tests/export",)),
    "engine": Room(("engine/*.py",), ("tests/search", "tests/portfolio")),
    "peers": Room(("peers/*.py",), ("tests/peers",)),
    "families": Room(("families/*.py", "families/*/*.py"), ("tests/families",)),
    "fleet": Room(("fleet/*.py",), ("tests/fleet", "tests/search/test_several_boards.py")),
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

    def names(self) -> list[str]:
        """What tests call that touch it: the functions and classes around the line, the innermost first, then its
        module."""
        around = [
            (node.lineno, node.name)
            for node in ast.walk(ast.parse(self.file.read_text()))
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.lineno <= self.line <= (node.end_lineno or 0)
        ]
        return [name for _, name in sorted(around, reverse=True)] + [self.file.stem]

    def __str__(self) -> str:
        return f"{self.number:4} {self.file.relative_to(ROOT)}:{self.line}: {self.change}"


def sample(room: str, count: int, seed: int) -> list[Mutant]:
    """The room's mutants, the same ones for the same count, seed and sources."""
    paths = sorted(path for pattern in ROOMS[room].files for path in (ROOT / "evoattn").glob(pattern))
    every = [(path, *mutant) for path in paths for mutant in mutants_of(path)]
    chosen = random.Random(f"{room} {seed}").sample(every, min(count, len(every)))
    chosen.sort(key=lambda mutant: mutant[:2])
    return [Mutant(n, path, line, change, source) for n, (path, line, change, source) in enumerate(chosen, 1)]


SKIPPED = "not slow and not browser"
PRELOADED = (
    "torch",
    "numpy",
    "sqlalchemy.dialects.sqlite",
    "alembic.command",
    "optuna",
    "rich.console",
    "yaml",
    "pytest",
)
"""Imported once; each mutant's tests run in a fork."""
OWN = ("evoattn", "tests", "scripts")
"""What this program has of itself, a fork imports again: from the copy, in which the fault is."""


def preload() -> None:
    """Import what the tests take seconds to import; the forks of this process have it then."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the tensors are small, and the machine is shared
    for name in PRELOADED:
        importlib.import_module(name)


def run_tests(copied: Path, tests: list[str], limit: float) -> str:
    """`passed`, `failed` or `timeout`, of the tests in the copy, in a fork of this process."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        os.setsid()
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        os.chdir(copied)
        sys.path[:0] = [str(copied)]
        for name in [name for name in sys.modules if name.split(".")[0] in OWN]:
            del sys.modules[name]
        os.environ["PYTHONPATH"] = str(copied)
        sys.dont_write_bytecode = True
        import pytest

        words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", SKIPPED, *tests]
        os._exit(1 if pytest.main(words) else 0)
    end = time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            verdict = "passed" if status == 0 else "failed"
            break
        if time.monotonic() > end:
            verdict = "timeout"
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
    return verdict


def nearest_first(mutant: Mutant, tests: list[str], copied: Path) -> tuple[list[str], list[str]]:
    """Of a room's tests, as files, those that name what is changed or what is around it, the nearest first; the
    others."""
    found: dict[str, int] = {}
    for test in tests:
        path = copied / test.split("::")[0]
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            text = file.read_text()
            name = str(file.relative_to(copied)) if path.is_dir() else test
            places = (n for n, around in enumerate(mutant.names()) if re.search(rf"\b{around}\b", text))
            found[name] = next(places, -1)
    near = sorted((name for name, place in found.items() if place >= 0), key=lambda name: found[name])
    return near, [name for name in found if name not in near]


def notice(mutant: Mutant, tests: list[str], copied: Path, limit: float) -> str:
    """`passed`, `failed` or `timeout`, of the tests of a room, the nearest first."""
    for some in nearest_first(mutant, tests, copied):
        if some and (verdict := run_tests(copied, some, limit)) != "passed":
            return verdict
    return "passed"


def run_room(room: str, mutants: list[Mutant], copied: Path) -> float:
    """Print a line per mutant; the share killed. Raises `RuntimeError` if the tests fail without a fault."""
    tests = [test for test in ROOMS[room].tests if (copied / test.split("::")[0]).exists()]
    started = time.monotonic()
    if run_tests(copied, tests, 600.0) != "passed":
        raise RuntimeError(f"The tests of {room} do not pass without a fault: {' '.join(tests)}")
    limit, killed = 30.0 + 4 * (time.monotonic() - started), 0
    for mutant in mutants:
        file = copied / mutant.file.relative_to(ROOT)
        honest = file.read_text()
        file.write_text(mutant.source)
        try:
            verdict = {"passed": "SURVIVED", "failed": "killed", "timeout": "timeout"}[
                notice(mutant, tests, copied, limit)
            ]
        finally:
            file.write_text(honest)
        killed += verdict != "SURVIVED"
        print(f"{room:10} {verdict:9}{mutant}", flush=True)
    share = killed / len(mutants) if mutants else 1.0
    print(f"{room}: {killed} of {len(mutants)} killed, {share:.0%}, {time.monotonic() - started:.0f} s")
    return share


def copy_tracked(folder: Path) -> Path:
    """The tracked files, in a folder of their own."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run(mutants: dict[str, list[Mutant]]) -> int:
    """Run all mutants on a copy of the tracked files; 1 if the tests of a room notice too few."""
    preload()
    with tempfile.TemporaryDirectory() as folder:
        copied = copy_tracked(Path(folder))
        shares = [run_room(room, of_room, copied) for room, of_room in mutants.items()]
    return int(min(shares) < WANTED)
