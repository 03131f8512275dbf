"""Mutation tests: one small fault after another is planted in a module, and the tests of its room are to notice it.

    nice -n 15 python scripts/python_mutants.py [ROOM…] [--count 30] [--seed 0] [--list] [--only NUMBER…]

Rooms: search, finals, ranking, storage, samplers, benchmark, validate, report; all unless named. Of each room `--count`
mutants are drawn with `--seed`, the same ones each time; `--list` shows them, `--only` runs some of them. Prints a line
per mutant (killed, survived, or timeout, which counts as killed) and the share killed per room. Exit code 1 if a room
is under 85 %. Works on a copy of the tracked files. The survivors and their reasons are in docs/mutants_python.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WANTED = 0.85
QUICK_SEARCH = ("tests/test_search.py", "tests/test_candidates.py")
FINAL_TESTS = (
    "tests/test_search.py::test_the_best_starting_config_takes_part_in_the_final",
    "tests/test_search.py::test_a_finalist_that_kills_the_worker_leaves_the_final_and_the_leaderboard",
)
SKIPPED = "not slow"


@dataclass(frozen=True)
class Room:
    """Files under `evoattn/`, and the tests that are to notice a fault in them."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "search": Room(("search/loop.py", "search/device.py", "search/recorder.py", "search/candidates.py"), QUICK_SEARCH),
    "finals": Room(("search/finals.py", "search/finalists.py"), ("tests/liars/test_contest.py", *FINAL_TESTS)),
    "ranking": Room(("timing/ranking.py",), ("tests/test_ranking.py",)),
    "storage": Room(("storage/*.py",), ("tests/storage",)),
    "samplers": Room(("samplers/*.py",), ("tests/samplers",)),
    "benchmark": Room(
        ("timing/benchmark.py",), ("tests/test_ranking.py", "tests/test_timer.py", "tests/liars/test_timed_path.py")
    ),
    "validate": Room(("correctness/validate.py",), ("tests/liars/test_timed_path.py", "tests/liars/test_arena.py")),
    "report": Room(
        (
            "report/summary.py",
            "report/analysis.py",
            "report/importance.py",
            "report/winner.py",
            "report/leaderboard.py",
        ),
        ("tests/report",),
    ),
}
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

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """`number` within its room; `change` says what was done at `line` of `file`."""

    number: int
    file: Path
    line: int
    change: str
    source: str


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], None]]]:
    """(what, how) of each fault that can be planted at this very node; `how` changes a copy of it in place."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} → {other.__name__}", lambda n: setattr(n, "ops", [other()])
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _joins_text(node):
        swapped = ARITHMETIC[type(node.op)]
        yield f"{type(node.op).__name__} → {swapped.__name__}", lambda n: setattr(n, "op", swapped())
    if isinstance(node, ast.BoolOp):
        junction = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} → {junction.__name__}", lambda n: setattr(n, "op", junction())
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} → {not node.value}", lambda n: setattr(n, "value", not n.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        for step in (1, -1):
            yield f"{node.value} → {node.value + step}", lambda n, step=step: setattr(n, "value", n.value + step)
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "negated condition", lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))
    if isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(a, ast.Starred) for a in node.args):
        yield "first two arguments swapped", lambda n: n.args.__setitem__(slice(0, 2), n.args[1::-1])


def _joins_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, (ast.JoinedStr, ast.List, ast.Tuple)) for side in (node.left, node.right))


def _removable(node: ast.AST) -> bool:
    """A statement that can go: a call, an assignment to an attribute or item, `+=`, `continue`, `raise`."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
    return isinstance(node, (ast.AugAssign, ast.Continue, ast.Raise, ast.Delete))


def _annotations(tree: ast.AST) -> set[int]:
    """Ids of the nodes inside annotations and decorators, which are not mutated."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        parts = [
            getattr(node, "annotation", None),
            getattr(node, "returns", None),
            *getattr(node, "decorator_list", []),
        ]
        skipped |= {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    return skipped


def mutants_of(path: Path) -> list[tuple[int, str, str]]:
    """(line, change, source) of every mutant of a file."""
    tree = ast.parse(path.read_text())
    skipped, found = _annotations(tree), []
    nodes = list(ast.walk(tree))
    for index, node in enumerate(nodes):
        if id(node) in skipped or not hasattr(node, "lineno"):
            continue
        changes = list(_changes(node))
        if _removable(node):
            changes.append(("removed: " + ast.unparse(node)[:60], lambda n: None))
        for what, how in changes:
            changed = copy.deepcopy(tree)
            twin = list(ast.walk(changed))[index]
            if what.startswith("removed: "):
                _replace(changed, twin, ast.copy_location(ast.Pass(), twin))
            else:
                how(twin)
            found.append((node.lineno, what, ast.unparse(ast.fix_missing_locations(changed))))
    return found


def _replace(tree: ast.AST, old: ast.AST, new: ast.stmt) -> None:
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and any(item is old for item in value):
                value[[item is old for item in value].index(True)] = new
                return


def sample(room: str, count: int, seed: int) -> list[Mutant]:
    """The room's mutants, the same ones for the same count, seed and sources."""
    paths = sorted(path for pattern in ROOMS[room].files for path in (ROOT / "evoattn").glob(pattern))
    every = [(path, *mutant) for path in paths for mutant in mutants_of(path)]
    chosen = random.Random(f"{room} {seed}").sample(every, min(count, len(every)))
    chosen.sort(key=lambda mutant: mutant[:2])
    return [Mutant(n, path, line, change, source) for n, (path, line, change, source) in enumerate(chosen, 1)]


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
            verdict = {"passed": "SURVIVED", "failed": "killed", "timeout": "timeout"}[run_tests(copied, tests, limit)]
        finally:
            file.write_text(honest)
        killed += verdict != "SURVIVED"
        print(f"{room:10}{mutant.number:4} {verdict:9}{mutant.file.relative_to(ROOT)}:{mutant.line}: {mutant.change}")
        sys.stdout.flush()
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copied = copy_tracked(Path(folder))
        shares = [run_room(room, mutants, copied) for room, mutants in chosen.items()]
    return 0 if min(shares) >= WANTED else 1


if __name__ == "__main__":  # tests spawn workers, which import this file again
    sys.exit(main())
