"""Faults in evoattn's own Python: a room's mutants, and runs of its tests on a copy of the sources for each."""

import ast
import compileall
import contextlib
import importlib
import json
import multiprocessing
import os
import py_compile
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import pytest
import yaml

from evoattn.model.paths import ROOT
from tests.mutation.changes import changes_of
from tests.mutation.python_faults import faults_of
from tests.mutation.rooms import ROOMS

WANTED = 0.95
"""The share of a room's mutants, but for equivalent ones, that its tests are to notice."""


@dataclass(frozen=True, eq=False)
class Mutant:
    """`number` within its room; `change` says what was done at `line` of `file`."""

    number: int
    file: Path
    line: int
    change: str
    make: Callable[[], str]

    @cached_property
    def source(self) -> str:
        """The changed file: some 20 ms."""
        return self.make()

    def names(self) -> list[str]:
        """What tests call that touch it: the functions and classes around the line, the innermost first, then the
        folder within a room, such as a family, then the module."""
        nodes = ast.walk(ast.parse(self.file.read_text())) if self.file.suffix == ".py" else ()
        around = [
            (node.lineno, node.name)
            for node in nodes
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.lineno <= self.line <= (node.end_lineno or 0)
        ]
        folder = self.file.parent.name
        return [name for _, name in sorted(around, reverse=True)] + [folder] * self.is_deep + [self.file.stem]

    @property
    def is_deep(self) -> bool:
        """Whether its folder is one of a room: a family, or what stands for another package."""
        return len(self.file.relative_to(ROOT).parts) > 3

    def __str__(self) -> str:
        return f"{self.number:4} {self.file.relative_to(ROOT)}:{self.line}: {self.change}"


def sample(room: str, count: int, seed: int) -> list[Mutant]:
    """The room's mutants in a random order: a larger sample begins with a smaller one, and a run that is cut off had
    some of all files. The same ones for the same seed and sources."""
    paths = sorted(path for pattern in ROOMS[room].files for path in ROOT.glob(pattern))
    every = [(path, *fault) for path in paths for fault in (faults_of if path.suffix == ".py" else changes_in)(path)]
    random.Random(f"{room} {seed}").shuffle(every)
    return [Mutant(n, *fault) for n, fault in enumerate(every[:count], 1)]


def survivors_of(paths: Iterable[Path]) -> dict[str, list[Mutant]]:
    """By room those that survived in these files of rows, and have no reason, as far as today's sources have them."""
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    rows = {(row["room"], row["file"], row["line"], row["change"]): row for row in lines}
    left: dict[str, list[Mutant]] = {}
    for row in rows.values():
        if row["verdict"] not in (PASSED, SURVIVED) or is_equivalent(row) or not (ROOT / row["file"]).exists():
            continue
        path, room = ROOT / row["file"], row["room"]
        texts = path.read_text().splitlines()
        same = [
            (line, make)
            for line, change, make in (faults_of if path.suffix == ".py" else changes_in)(path)
            if change == row["change"] and texts[line - 1].strip() == row["text"]
        ]
        for line, make in same[:1]:
            left.setdefault(room, []).append(Mutant(row["number"], path, line, row["change"], make))
    return left


def changes_in(path: Path) -> list[tuple[int, str, Callable[[], str]]]:
    """As `faults_of`, of CUDA that is no family's: no config of a family has it."""
    text = path.read_text()
    return [(c.line, f"{c.kind}: {c.what.strip()}", partial(c.apply, text)) for c in changes_of(text)]


PRELOADED = (
    *("torch", "numpy", "cupy", "networkx", "transformers.masking_utils", "transformers.modeling_utils"),
    *("sqlalchemy.dialects.sqlite", "alembic.command", "optuna", "jinja2", "rich.console", "typer.testing", "yaml"),
    *("pytest", "hypothesis"),
)
"""Imported once, those that there are; each mutant's tests run in a fork."""
OWN = ("evoattn", "tests", "scripts", "benchmarks")
"""What this program has of itself, a fork imports again: from the copy, in which the fault is."""
KILLED, TIMEOUT, SURVIVED = "killed", "timeout", "SURVIVED"
PASSED = "passed so far"
"""The quickest tests of the nearest files pass: the others have their turn last."""
EQUIVALENT = "equivalent"
"""Survived, for a reason that is written down."""


def preload() -> None:
    """Import what the tests take seconds to import; the forks of this process have it then."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the tensors are small, and the machine is shared
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


_ITEMS: dict[str, dict[str, float]] = {}
"""By file of tests and name what a test takes, a guess in seconds; processes that judge have it as it was when they
began."""
DIGEST, QUICK, SLOW = 0.01, 0.1, 1.0
"""The guess. Digests say at once that something is not as it was."""


class Listing:
    """A plugin of pytest that writes name and guess of each test that it found."""

    def __init__(self, listed: Path) -> None:
        self._listed = listed

    def pytest_collection_finish(self, session: Any) -> None:
        found = {item.nodeid: SLOW if item.get_closest_marker("slow") else QUICK for item in session.items}
        found |= {name: DIGEST for name in found if re.search("/test_facts_of|_is_decided_", name)}
        self._listed.write_text(json.dumps(found))


class Said:
    """A plugin of pytest that writes a line of JSON for each test: name, and whether it failed."""

    def __init__(self, said: Path) -> None:
        self._said, self._failed = said, False

    def pytest_runtest_logstart(self) -> None:
        self._failed = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._failed |= report.failed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._say(nodeid, self._failed)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._say(report.nodeid, True)

    def _say(self, *words: object) -> None:
        with self._said.open("a") as file:
            file.write(json.dumps(words) + "\n")


class Chosen:
    """A plugin of pytest that runs these tests alone, in this order."""

    def __init__(self, names: list[str]) -> None:
        self._turns = {name: turn for turn, name in enumerate(names)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._turns), key=lambda item: self._turns[item.nodeid]
        )


def run_tests(copied: Path, words: list[str], limit: float, *plugins: Any) -> str:
    """`passed`, `failed` or `timeout`, of pytest in the copy, in a fork of this process."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        status = 1
        try:
            status = _pytest(copied, words, plugins)
        finally:  # whatever is raised: this is a copy of a process that has more to do
            os._exit(status)
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


def said_in(copied: Path) -> Path:
    """The file of what `Said` says of tests in a copy."""
    return copied.with_name("said.jsonl")


def _pytest(copied: Path, words: list[str], plugins: Sequence[Any]) -> int:
    """1 if a test failed. Nothing of this process is as it was afterwards."""
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    os.chdir(copied)
    sys.path[:0] = [str(copied)]
    for name in [name for name in sys.modules if name.split(".")[0] in OWN]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(copied), *THEIRS])
    os.environ["TMPDIR"], tempfile.tempdir = str(copied.parent), None
    status = pytest.main(
        ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not browser and not device", *words], plugins
    )
    return int(status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED))


def files_of(room: str, copied: Path) -> list[str]:
    """The files of a room's tests."""
    found: dict[str, None] = {}
    for test in ROOMS[room].tests:
        for path in sorted(copied.glob(test)):
            each = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
            found |= {str(one.relative_to(copied)): None for one in each}
    return list(found)


def nearest_first(mutant: Mutant, tests: Iterable[str], copied: Path) -> list[str]:
    """Files of tests: those first that name what is changed or what is around it, the nearest of them first."""
    names = mutant.names()
    own = tuple(f"test_{name}" for name in names)

    def place(test: str) -> tuple[bool, int]:
        text = (copied / test).read_text()
        found = next((n for n, around in enumerate(names) if re.search(rf"\b{around}\b", text)), len(names))
        return found == len(names) or not Path(test).stem.startswith(own), found

    return sorted(tests, key=place)


def in_turns(mutant: Mutant, tests: list[str], copied: Path) -> list[list[str]]:
    """The tests that are to notice it, in two turns: the quickest of the room's `tests`, which are digests and those of
    the nearest files; then all others of these and of files that import the module, and those of the room's others."""
    files = nearest_first(mutant, (file for file in tests if file in _ITEMS), copied)
    digests = [name for file in files for name, seconds in _ITEMS[file].items() if seconds == DIGEST]
    near = dict.fromkeys([*digests, *sorted(varied(files[:MOST_FILES]), key=_guess)])
    first = _within(FIRST_SECONDS, list(near))
    more = nearest_first(mutant, sorted({*files[:MOST_FILES], *importers(mutant, copied)}), copied)
    others = dict.fromkeys([*varied(more), *varied(files)])
    return [first, _within(MOST_SECONDS, [name for name in others if name not in first])]


def varied(files: Sequence[str]) -> list[str]:
    """The tests of some files: each function's first case, then second cases and so on, the files by turns. One file
    of many cases leaves the time of a turn to others."""
    places = []
    for file in files:
        cases: Counter[str] = Counter()
        for name in sorted(_ITEMS[file], key=_guess):
            function = name.split("[")[0]
            places.append((cases[function], list(cases).index(function) if cases[function] else len(cases), name))
            cases[function] += 1
    return [name for *_, name in sorted(places, key=lambda place: place[:2])]


def _guess(name: str) -> float:
    """Seconds that a test takes."""
    return _ITEMS[file_of(name)][name]


def _within(seconds: float, names: Sequence[str]) -> list[str]:
    """The first of some tests, as many as end within so many seconds."""
    return [name for total, name in zip(accumulate(map(_guess, names)), names) if total < seconds]


NOT_ASKED = "mutation", "cheats/test_every_cheat.py"
"""Tests that take minutes, or are of these programs."""
MOST_FILES = 8
"""Of the room's tests, and in the second turn of those that import the module."""
FIRST_SECONDS, MOST_SECONDS = 12.0, 50.0
"""Of the tests of a turn."""


def file_of(test: str) -> str:
    """The file of a test's name, which may be a file's too."""
    return test.split("::")[0]


def run_items(copied: Path, names: list[str]) -> tuple[str, str]:
    """What `run_tests` says of these tests, and the first of them that fails, or its file."""
    seconds = sum(_ITEMS[file_of(name)][name] for name in names)
    said_in(copied).unlink(missing_ok=True)
    files = list(dict.fromkeys(map(file_of, names)))
    plugins = Chosen(sorted(names, key=lambda name: files.index(file_of(name)))), Said(said_in(copied))
    verdict = run_tests(copied, ["-x", *files], 25.0 + 4 * seconds, *plugins)
    return verdict, next((name for name, failed in rows_of(said_in(copied)) if failed), "")


def fails_anyway(name: str, copied: Path) -> bool:
    """Whether a test, or one of a file's, fails on this machine without a fault: all processes keep what they found."""
    found = {name: word for word, name in (line.split(" ", 1) for line in lines_in(tried_in(copied)))}
    if name not in found:
        failed = run_items(copied, [name] if "::" in name else [*_ITEMS[name]])[1]
        found[name] = "fails" if failed else "passes"
        with tried_in(copied).open("a") as file:
            file.write(f"{found[name]} {name}\n")
    return found[name] == "fails"


def tried_in(copied: Path) -> Path:
    """A file of all copies: which tests pass without a fault, and which do not."""
    return copied.parents[1] / "tried.txt"


THEIRS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
"""Folders of packages, besides Python's own."""
_COPIES: list[Path] = []
"""This process's copy of the tracked files."""
_DRAWN: dict[tuple[str, int], Mutant] = {}
"""By room and number those that this run judges: processes that judge have them as they were when they began."""


@contextlib.contextmanager
def copies(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that have a copy of the tracked files each."""
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _begin, (Path(folder),)) as pool,
    ):
        Path(folder).chmod(0o711)  # a PostgreSQL server of the tests is another user's
        yield pool


def importers(mutant: Mutant, copied: Path) -> list[str]:
    """Files of tests that import the module."""
    package, _, name = mutant.file.relative_to(ROOT).with_suffix("").as_posix().rpartition("/")
    imported = re.compile(rf"\b{re.escape(package.replace('/', '.'))}(\.| import [^\n]*\b){name}\b")
    return [file for file in _ITEMS if imported.search((copied / file).read_text())]


def _begin(folder: Path) -> None:
    place = folder / str(os.getpid()) / "copy"
    place.mkdir(parents=True)
    _COPIES.append(copy_tracked(place))
    by_hash = py_compile.PycInvalidationMode.CHECKED_HASH  # by its time a fault of the same second would be overlooked
    compileall.compile_dir(place / "evoattn", quiet=2, invalidation_mode=by_hash)


def lines_in(file: Path) -> list[str]:
    """The lines of a file, if there is one; without the last one, if it is cut off."""
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def rows_of(file: Path) -> list[Any]:
    return [json.loads(line) for line in lines_in(file)]


def list_tests() -> None:
    """Know which tests there are."""
    with tempfile.TemporaryDirectory() as folder:
        copied, listed = copy_tracked(Path(folder) / "copy"), Path(folder) / "listed.json"
        run_tests(
            copied, ["--collect-only", *(f"--ignore=tests/{one}" for one in NOT_ASKED), "tests"], 900.0, Listing(listed)
        )
        for name, seconds in json.loads(listed.read_text()).items():
            _ITEMS.setdefault(file_of(name), {})[name] = seconds


def judge(room: str, number: int, deep: bool) -> dict[str, Any]:
    """A row of JSON: the mutant, and what became of it in a turn of tests, the second one if `deep`."""
    [copied], started = _COPIES, time.monotonic()
    mutant = _DRAWN[room, number]
    file = copied / mutant.file.relative_to(ROOT)
    honest, names = file.read_text(), in_turns(mutant, files_of(room, copied), copied)[int(deep)]
    said, by = "passed", ""
    while names:
        file.write_text(mutant.source)
        try:
            said, by = run_items(copied, names)
        finally:
            file.write_text(honest)
        if said == "timeout" and run_items(copied, names)[0] == "timeout":  # the machine has no time for them
            said = "passed"
        if not by or not fails_anyway(by, copied):
            break
        print(f"    left out, as it fails: {by}", flush=True)
        said, names = "passed", [name for name in names if by not in (name, file_of(name))]
    where = {"file": str(mutant.file.relative_to(ROOT)), "line": mutant.line, "change": mutant.change}
    where["text"] = honest.splitlines()[mutant.line - 1].strip()
    where["by"] = by
    verdict = {"failed": KILLED, "timeout": TIMEOUT}.get(said, SURVIVED if deep else PASSED)
    return {"room": room, "verdict": verdict, "number": mutant.number, **where, "s": round(time.monotonic() - started)}


def copy_tracked(folder: Path) -> Path:
    """The tracked files, in a folder of their own; all files where there is no repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    found = (str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file())
    for name in found if listed.returncode else filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and "__pycache__" not in name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run(mutants: dict[str, list[Mutant]], jobs: int = 1, out: Path | None = None) -> int:
    """Run all mutants but those that `out` has, the rooms in turn, first turns of tests before second ones, each
    process on its copy of the tracked files; a line for each, and the table at the end; 1 if the tests of a room
    notice too few."""
    preload()
    rows = {(row["room"], row["number"]): row for row in (rows_of(out) if out else [])}
    turns = zip_longest(*([(room, m, rows.get((room, m.number))) for m in mutants[room]] for room in mutants))
    left = [one for turn in turns for one in turn if one]
    asked = [(room, m, bool(row)) for room, m, row in left if row is None or row["verdict"] == PASSED]
    _DRAWN.update({(room, m.number): m for room, m, _ in asked})
    list_tests()
    if lacking := sorted({file for room in mutants for file in files_of(room, ROOT)} - _ITEMS.keys()):
        print(f"    have no tests on this machine: {', '.join(lacking)}", flush=True)
    with copies(jobs) as pool:

        def ask(room: str, mutant: Mutant, deep: bool) -> None:
            pending[pool.submit(judge, room, mutant.number, deep)] = room, mutant

        pending: dict[Any, tuple[str, Mutant]] = {}
        for one in asked:
            ask(*one)
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                (room, mutant), row = pending.pop(future), future.result()
                rows[room, mutant.number] = row
                print("{room:12} {verdict:13} {s:4} s {number:4} {file}:{line}: {change}".format(**row), flush=True)
                if out:
                    with out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                if row["verdict"] == PASSED:
                    ask(room, mutant, True)
    return table(list(rows.values()))


@cache
def equivalents() -> list[dict[str, str]]:
    """Mutants that no test can tell from the original: a line of a file, a part of the change's name (empty: any), and
    why."""
    found: list[dict[str, str]] = yaml.safe_load(Path(__file__).with_name("python_reasons.yaml").read_text())
    return found


def is_equivalent(row: dict[str, Any]) -> bool:
    """Whether a row of JSON is of one of these."""
    return any(
        row["file"] in (f"evoattn/{one['file']}", one["file"])
        and row.get("text") == one["line"]
        and one["what"] in row["change"]
        for one in equivalents()
    )


def table(rows: list[dict[str, Any]]) -> int:
    """Print how many of each room were noticed; 1 if too few of one."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        lives = row["verdict"] in (PASSED, SURVIVED)
        verdict = EQUIVALENT if lives and is_equivalent(row) else SURVIVED if lives else row["verdict"]
        counts.setdefault(row["room"], Counter())[verdict] += 1
    words = (KILLED, TIMEOUT, EQUIVALENT, SURVIVED)
    print("| room | mutants | killed | timeout | equivalent | survived | noticed of the rest |")
    print("|---" * 7 + "|")
    shares = [1.0]
    for room, count in sorted(counts.items()):
        shares.append(1 - count[SURVIVED] / max(1, count.total() - count[EQUIVALENT]))
        print(f"| {room} | {count.total()} | {' | '.join(str(count[word]) for word in words)} | {shares[-1]:.0%} |")
    return int(min(shares) < WANTED)
