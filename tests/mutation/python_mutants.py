"""Faults in evoattn's own Python: a room's mutants, and runs of its tests on a copy of the sources for each."""

import ast
import contextlib
import importlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import yaml

from evoattn.model.paths import ROOT
from tests.mutation.changes import changes_of
from tests.mutation.python_faults import faults_of
from tests.mutation.python_lines import FAST, Called, Calls, callers

WANTED = 0.95
"""The share of a room's mutants, but for equivalent ones, that its tests are to notice."""
FINAL_TESTS = (
    "tests/search/test_finals.py::test_the_best_starting_config_takes_part_in_the_final",
    "tests/search/test_finals.py::test_a_finalist_that_kills_the_worker_leaves_the_final_and_the_leaderboard",
)


ANSWERS = "tests/correctness/test_facts_of_answers.py"
"""Digests of the inputs and answers of checks."""
DECISIONS = "tests/families/test_decisions.py"
"""Digests of what is decided of kernels: it notices most faults of what makes them, in seconds."""


@dataclass(frozen=True)
class Room:
    """Files, and the tests that are to notice a fault in them: files, folders, tests or patterns of them."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "search": Room(("evoattn/search/*.py",), ("tests/search", "tests/cli/test_try.py", "tests/export/test_command.py")),
    "finals": Room(
        ("evoattn/engine/finals.py", "evoattn/search/finalists.py"),
        ("tests/search/test_finalists.py", "tests/cheats/test_contest.py", *FINAL_TESTS),
    ),
    "ranking": Room(("evoattn/timing/ranking.py",), ("tests/timing/test_ranking.py",)),
    "storage": Room(("evoattn/storage/*.py",), ("tests/storage",)),
    "samplers": Room(("evoattn/samplers/*.py",), ("tests/samplers",)),
    "benchmark": Room(
        ("evoattn/timing/benchmark.py",),
        (
            "tests/timing/test_benchmark.py",
            "tests/timing/test_timer.py",
            "tests/cheats/test_timed_path.py",
            "tests/cheats/test_other_outputs.py",
        ),
    ),
    "validate": Room(
        (
            "evoattn/correctness/validate.py",
            "evoattn/correctness/judge.py",
            "evoattn/correctness/cases.py",
            "evoattn/correctness/interpreter_cases.py",
        ),
        (
            *(DECISIONS, ANSWERS),
            "tests/correctness/test_validate.py",
            "tests/correctness/test_cases.py",
            "tests/cheats/test_timed_path.py",
            "tests/cheats/test_other_outputs.py",
        ),
    ),
    "ops": Room(("evoattn/ops/**/*.py",), ("tests/ops",)),
    "portfolio": Room(("evoattn/portfolio/*.py",), ("tests/portfolio",)),
    "integrations": Room(("evoattn/integrations/*.py",), ("tests/integrations",)),
    "timing": Room(("evoattn/timing/*.py",), ("tests/timing", "tests/cheats")),
    "cost": Room(("evoattn/cost/*.py",), (DECISIONS, "tests/cost")),
    "model": Room(("evoattn/model/*.py",), (DECISIONS, "tests/model", "tests/test_problem.py")),
    "export": Room(("evoattn/export/*.py",), ("tests/export",)),
    "engine": Room(("evoattn/engine/*.py",), ("tests/search", "tests/portfolio")),
    "peers": Room(("evoattn/peers/*.py",), ("tests/peers",)),
    "families": Room(("evoattn/families/*.py", "evoattn/families/*/*.py"), (DECISIONS, "tests/families")),
    "fleet": Room(("evoattn/fleet/*.py",), ("tests/fleet", "tests/search/test_several_boards.py")),
    "report": Room(
        (
            "evoattn/report/summary.py",
            "evoattn/report/analysis.py",
            "evoattn/report/data.py",
            "evoattn/report/winner.py",
        ),
        ("tests/report",),
    ),
    "flex": Room(
        (
            *(f"evoattn/ops/{name}.py" for name in ("flex", "block_masks")),
            *("evoattn/*/block_list.py", "evoattn/families/mask_blocks.py", "evoattn/integrations/listed_mask.py"),
        ),
        (
            *(DECISIONS, ANSWERS),
            *("tests/ops/test_flex*.py", "tests/ops/test_created_masks.py", "tests/*/test_block_list.py"),
            *("tests/integrations/test_listed_mask.py", "tests/peers/test_flex_masks.py"),
            *("tests/model/test_facts_of_expressions.py", "tests/ops/test_facts_of_calls.py"),
        ),
    ),
    "expressions": Room(
        (
            *(f"evoattn/ops/{name}.py" for name in ("mods", "given")),
            *(f"evoattn/model/score_{name}.py" for name in ("cuda", "lines", "ranges")),
        ),
        (*("tests/model/test_facts_of_expressions.py", "tests/model/test_score.py", "tests/ops"),),
    ),
    "mask_blocks": Room(
        ("templates/device/mask_blocks.cuh", "templates/device/score_range.cuh", "evoattn/model/score_ranges.py"),
        ("tests/model/test_facts_of_expressions.py", "tests/ops/test_created_masks.py", "tests/model/test_score.py"),
    ),
    "backward": Room(
        (
            "evoattn/ops/gradients.py",
            *("evoattn/*/backward.py", "evoattn/correctness/backward_cases.py", "evoattn/correctness/gradients.py"),
            "evoattn/families/backward_*/*.py",
        ),
        (
            *(DECISIONS, ANSWERS),
            *("tests/ops/test_training*.py", "tests/ops/test_backward_picks.py", "tests/ops/test_flex_gradients.py"),
            *(
                "tests/correctness/test_gradients.py",
                "tests/families/test_backward*.py",
                "tests/peers/test_backward.py",
            ),
            *("tests/integrations/test_models_that_train.py", "tests/benchmarks/test_backward.py"),
        ),
    ),
    "serving": Room(
        (
            *("evoattn/*/append.py", "evoattn/*/merge.py", "evoattn/*/sequences.py", "evoattn/model/lengths.py"),
            *("evoattn/families/append_kv/*.py", "evoattn/families/merge_*.py", "evoattn/families/merge_parts/*.py"),
            "evoattn/families/row_kernels.py",
            *(f"evoattn/integrations/{name}.py" for name in ("vllm", "sglang", "static_cache")),
            *("evoattn/integrations/flash_attn/*.py", "evoattn/ops/beside.py"),
        ),
        (
            DECISIONS,
            *(f"tests/ops/test_{name}.py" for name in ("append", "merge", "mixed", "growing", "varlen", "attention")),
            *("tests/families/test_append_kv.py", "tests/families/test_merge_parts.py", "tests/operation"),
            *(f"tests/integrations/test_{name}.py" for name in ("vllm", "sglang", "static_cache", "flash_attn_*")),
            *("tests/model/test_sequences.py", "tests/correctness", "tests/families/test_every_family.py"),
        ),
    ),
    "fp8": Room(
        (
            *("evoattn/ops/attention_fp8.py", "evoattn/ops/beside.py"),
            *("evoattn/*/quantize.py", "evoattn/model/scales.py", "evoattn/correctness/eight_bits.py"),
            *("evoattn/families/quantize/*.py", "evoattn/families/fp8_wgmma/*.py"),
            "evoattn/integrations/flash_attn/eight_bits.py",
        ),
        (
            DECISIONS,
            *("tests/*/test_eight_bits.py", "tests/ops/test_attention_fp8.py", "tests/*/test_quantize.py"),
            *("tests/ops/test_append.py", "tests/ops/test_merge.py", "tests/ops/test_facts_of_calls.py"),
            *("tests/families/test_fp8_wgmma.py", "tests/families/test_eight_bit_cache.py", "tests/correctness"),
            *("tests/families/test_every_family.py", "tests/integrations/test_flash_attn_*.py"),
        ),
    ),
    "calibration": Room(
        (
            *("evoattn/portfolio/calibrate.py", "evoattn/portfolio/calibrations.py", "evoattn/portfolio/wins.py"),
            *("evoattn/cost/correction*.py", "evoattn/model/calibrated.py", "evoattn/model/played.py"),
            "evoattn/ops/choice.py",
        ),
        (
            *("tests/portfolio", "tests/ops/test_race.py", "tests/ops/test_choice.py"),
            *("tests/cost/test_correction.py", "tests/model/test_gpu.py", "tests/benchmarks/test_stranger.py"),
            *("tests/ops/test_known_calls.py", "tests/cost/test_facts_of_estimates.py"),
        ),
    ),
}


@dataclass(frozen=True, eq=False)
class Mutant:
    """`number` within its room; `change` says what was done at `line` of `file`."""

    number: int
    file: Path
    line: int
    change: str
    source: str

    def names(self) -> list[str]:
        """What tests call that touch it: the functions and classes around the line, the innermost first, then of a
        family's module the family, then its module."""
        nodes = ast.walk(ast.parse(self.file.read_text())) if self.file.suffix == ".py" else ()
        around = [
            (node.lineno, node.name)
            for node in nodes
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.lineno <= self.line <= (node.end_lineno or 0)
        ]
        family = [self.file.parent.name] if self.file.parent.parent.name == "families" else []
        return [name for _, name in sorted(around, reverse=True)] + family + [self.file.stem]

    def __str__(self) -> str:
        return f"{self.number:4} {self.file.relative_to(ROOT)}:{self.line}: {self.change}"


def sample(room: str, count: int, seed: int) -> list[Mutant]:
    """The room's mutants, the same ones for the same count, seed and sources."""
    paths = sorted(path for pattern in ROOMS[room].files for path in ROOT.glob(pattern))
    every = [(path, *fault) for path in paths for fault in (faults_of if path.suffix == ".py" else changes_in)(path)]
    chosen = random.Random(f"{room} {seed}").sample(every, min(count, len(every)))
    chosen.sort(key=lambda mutant: mutant[:2])
    return [Mutant(n, path, line, change, make()) for n, (path, line, change, make) in enumerate(chosen, 1)]


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
            left.setdefault(room, []).append(Mutant(row["number"], path, line, row["change"], make()))
    return left


def changes_in(path: Path) -> list[tuple[int, str, Callable[[], str]]]:
    """As `faults_of`, of CUDA that is no family's: no config of a family has it."""
    text = path.read_text()
    return [(c.line, f"{c.kind}: {c.what.strip()}", partial(c.apply, text)) for c in changes_of(text)]


SKIPPED, SLOW = "not slow and not browser", "slow and not browser"
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
OWN = ("evoattn", "tests", "scripts", "benchmarks")
"""What this program has of itself, a fork imports again: from the copy, in which the fault is."""
KILLED, KILLED_SLOW, TIMEOUT, SURVIVED = "killed", "killed, slow", "timeout", "SURVIVED"
PASSED = "passed so far"
"""The fast tests of its room pass: tests elsewhere and slow ones have their turn last."""
EQUIVALENT = "equivalent"
"""Survived, for a reason that is written down."""


def preload() -> None:
    """Import what the tests take seconds to import; the forks of this process have it then."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the tensors are small, and the machine is shared
    for name in PRELOADED:
        importlib.import_module(name)


@dataclass(eq=False)
class Sound:
    """Tests without a fault: seconds by file, and the tests that fail all the same, which are left out."""

    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    called: dict[str, Called] = field(default_factory=dict)
    """By file of tests."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        file = report.nodeid.split("::")[0]
        self.seconds[file] = self.seconds.get(file, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def limit(self, tests: list[str]) -> float:
        """Seconds after which a mutant counts as endless."""
        return 25.0 + 4 * sum(self.seconds.get(test.split("::")[0], 0.0) for test in tests)


def run_tests(copied: Path, words: list[str], limit: float, watch: Sound | None = None, calls_too: bool = False) -> str:
    """`passed`, `failed` or `timeout`, of pytest in the copy, in a fork of this process. `watch` sees all the tests,
    which otherwise end with the first that fails. `calls_too`: and what they call."""
    sys.stdout.flush()
    said = copied.with_name(copied.name + ".json")
    child = os.fork()
    if not child:
        status = 1
        try:
            status = _pytest(copied, words, watch, calls_too, said)
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
    if watch and said.exists():
        watch.seconds, watch.failed, called = json.loads(said.read_text())
        watch.called |= {words[-1]: called} if calls_too else {}
        said.unlink()
    return verdict


def _pytest(copied: Path, words: list[str], watch: Sound | None, calls_too: bool, said: Path) -> int:
    """1 if a test failed; what `watch` saw is written to a file. Nothing of this process is as it was afterwards."""
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
    sys.dont_write_bytecode = True
    import pytest

    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist", "--continue-on-collection-errors" if watch else "-x"]
    calls = Calls(copied) if calls_too else None
    status = pytest.main(["-q", *plugins, *words], [watch] if watch else None)
    if watch:
        said.write_text(json.dumps([watch.seconds, watch.failed, calls.found() if calls else {}]))
    return int(status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED))


def files_of(room: str, copied: Path) -> list[str]:
    """A room's tests: files, or tests of a file."""
    found: dict[str, None] = {}
    for test in ROOMS[room].tests:
        file = test.split("::")[0]
        for path in sorted(copied.glob(file)):
            each = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
            found |= {test if "::" in test else str(one.relative_to(copied)): None for one in each}
    return list(found)


def nearest_first(mutant: Mutant, tests: list[str], copied: Path) -> tuple[list[str], list[str]]:
    """Of a room's tests those that name what is changed or what is around it, the nearest first; the others."""
    found: dict[str, int] = {}
    for test in tests:
        text = (copied / test.split("::")[0]).read_text()
        places = (n for n, around in enumerate(mutant.names()) if re.search(rf"\b{around}\b", text))
        found[test] = next(places, -1)
    own = tuple(f"test_{name}" for name in mutant.names())
    near = [name for name, place in found.items() if place >= 0]
    near.sort(key=lambda name: (not Path(name.split("::")[0]).stem.startswith(own), found[name]))
    return near, [name for name in found if name not in near]


def elsewhere(mutant: Mutant, tests: list[str], copied: Path) -> list[str]:
    """Tests of other rooms that import the module, then those that name the function or class that is changed: a
    few."""
    package, _, module = str(mutant.file.relative_to(ROOT).with_suffix("")).replace("/", ".").rpartition(".")
    imports = rf"\b{re.escape(package)}(\.| import [^\n]*\b){module}\b"
    named = "|".join([imports, *(rf"\b{re.escape(name)}\b" for name in mutant.names()[:-1][:1])])
    paths = (path for path in sorted((copied / "tests").rglob("test_*.py")) if "mutation" not in path.parts)
    texts = {str(path.relative_to(copied)): path.read_text() for path in paths}
    known = {test.split("::")[0] for test in tests}
    found = [file for file, text in texts.items() if file not in known and re.search(named, text)]
    return sorted(found, key=lambda file: not re.search(imports, texts[file]))[:MOST_ELSEWHERE]


MOST_ELSEWHERE, MOST_SLOW = 5, 3
"""Files of tests: a function of many is tested in its own room, and slow tests take long."""


def notice(
    mutant: Mutant, tests: list[str], copied: Path, sound: Sound, deep: bool, called_by: list[str] | None
) -> str:
    """What becomes of it in a room's tests: the nearest first, then the others. `deep`: in tests elsewhere, then in the
    slow ones of the nearest. `called_by`: the files of fast tests that run its line; None if that is not known."""
    near, others = nearest_first(mutant, tests, copied)
    far = elsewhere(mutant, tests, copied) if deep else []
    slow = [*near, *far][:MOST_SLOW]
    if called_by is not None:
        near, others = ([test for test in some if test.split("::")[0] in called_by] for some in (near, others))
        known = {test.split("::")[0] for test in (*tests, *far)}
        far = [*far, *(file for file in called_by if file not in known)][:MOST_ELSEWHERE]
    left_out = [word for test in sound.failed for word in ("--deselect" if "::" in test else "--ignore", test)]
    for some, mark in ((far, SKIPPED), (slow, SLOW)) if deep else ((near, SKIPPED), (others, SKIPPED)):
        if not some:
            continue
        words = ["-m", mark, *left_out, *some]
        verdict = run_tests(copied, words, SLOW_SECONDS if deep else sound.limit(some))
        if verdict == "failed" and (not deep or _passes_without(mutant, copied, words)):
            return KILLED if mark == SKIPPED else KILLED_SLOW
        if verdict == "timeout" and not deep:
            return TIMEOUT
    return SURVIVED if deep else PASSED


_PASSES: dict[tuple[str, ...], bool] = {}
"""By words of pytest, whether the tests pass without a fault."""


def _passes_without(mutant: Mutant, copied: Path, words: list[str]) -> bool:
    """Whether the tests pass without the fault; leaves the fault where it is."""
    if tuple(words) not in _PASSES:
        (copied / mutant.file.relative_to(ROOT)).write_text(mutant.file.read_text())
        _PASSES[tuple(words)] = run_tests(copied, words, SLOW_SECONDS) == "passed"
        (copied / mutant.file.relative_to(ROOT)).write_text(mutant.source)
    return _PASSES[tuple(words)]


SLOW_SECONDS = 100.0
"""For the slow tests of a mutant: longer ones tell nothing."""
THEIRS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
"""Folders of packages, besides Python's own."""
_COPIES: list[Path] = []
"""This process's copy of the tracked files."""


def _begin(folder: Path) -> None:
    place = folder / str(os.getpid()) / "copy"
    place.mkdir(parents=True)
    _COPIES.append(copy_tracked(place))


MOST_WATCHED = 3.0
"""Seconds of the tests of a file whose calls are watched where that makes them some times slower."""


def sound_file(file: str) -> Sound:
    """A file's tests as they are without a fault, and what they call: anything, if that is not known."""
    [copied], sound, watched = _COPIES, Sound(called={file: {"": []}}), Sound()
    verdict = run_tests(copied, ["-m", SKIPPED, file], 600.0, sound, FAST)
    if verdict == "timeout":
        raise RuntimeError(f"{file} takes over ten minutes without a fault.")
    if verdict == "failed" and not sound.failed:  # pytest itself fell over
        sound.failed.append(file)
    if not FAST and sum(sound.seconds.values()) < MOST_WATCHED:
        run_tests(copied, ["-m", SKIPPED, file], 100.0, watched, calls_too=True)
        sound.called |= watched.called
    return sound


def judge(room: str, mutant: Mutant, sound: Sound, deep: bool, called_by: list[str] | None) -> dict[str, Any]:
    """A row of JSON: the mutant, and what became of it."""
    [copied], started = _COPIES, time.monotonic()
    file = copied / mutant.file.relative_to(ROOT)
    honest = file.read_text()
    file.write_text(mutant.source)
    try:
        verdict = notice(mutant, files_of(room, copied), copied, sound, deep, called_by)
    finally:
        file.write_text(honest)
    place = {"file": str(mutant.file.relative_to(ROOT)), "line": mutant.line, "change": mutant.change}
    place["text"] = honest.splitlines()[mutant.line - 1].strip()
    place["called_by"] = None if called_by is None else len({*called_by} & {*files_of(room, copied)})
    return {"room": room, "verdict": verdict, "number": mutant.number, **place, "s": round(time.monotonic() - started)}


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
    """Run all mutants but those that `out` has, the rooms in turn, each process on its copy of the tracked files; a
    line for each, and the table at the end; 1 if the tests of a room notice too few."""
    preload()
    lines = out.read_text().splitlines() if out and out.exists() else []
    rows = {(row["room"], row["number"]): row for row in map(json.loads, lines)}
    turns = zip_longest(*([(room, mutant) for mutant in mutants[room]] for room in mutants))
    left = [(room, m, rows.get((room, m.number))) for room, m in filter(None, chain.from_iterable(turns))]
    files = {test.split("::")[0]: None for room in mutants for test in files_of(room, ROOT)}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _begin, (Path(folder),)) as pool,
    ):
        sound, called = Sound(), dict[str, Called]()
        for one in pool.map(sound_file, files):
            sound.seconds |= one.seconds
            sound.failed += one.failed
            called |= one.called
        if not sound.seconds:
            raise RuntimeError("No test ran.")
        print(f"{sum(sound.seconds.values()):.0f} s without a fault", flush=True)
        print(*(f"    left out, as it fails: {test}\n" for test in sound.failed), sep="", end="", flush=True)
        asked = [(room, m, bool(row)) for room, m, row in left if row is None or row["verdict"] == PASSED]
        given, pending = dict[Mutant, tuple[Any, ...]](), dict[Any, tuple[str, Mutant]]()
        for room, mutant, deep in asked:
            text = mutant.file.read_text() if mutant.file.suffix == ".py" else ""
            called_by = callers(called, str(mutant.file.relative_to(ROOT)), text, mutant.line)
            given[mutant] = room, mutant, sound, deep, called_by
            pending[pool.submit(judge, *given[mutant])] = room, mutant
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                (room, mutant), row = pending.pop(future), future.result()
                rows[room, mutant.number] = row
                print("{room:12} {verdict:13} {s:4} s {number:4} {file}:{line}: {change}".format(**row), flush=True)
                if out:
                    with out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                if row["verdict"] == PASSED:
                    again = (*given[mutant][:3], True, given[mutant][-1])
                    pending[pool.submit(judge, *again)] = room, mutant
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
    words = (KILLED, TIMEOUT, KILLED_SLOW, EQUIVALENT, SURVIVED)
    print("| room | mutants | killed | timeout | by slow tests | equivalent | survived | noticed of the rest |")
    print("|---" * 8 + "|")
    shares = [1.0]
    for room, count in sorted(counts.items()):
        shares.append(1 - count[SURVIVED] / max(1, count.total() - count[EQUIVALENT]))
        print(f"| {room} | {count.total()} | {' | '.join(str(count[word]) for word in words)} | {shares[-1]:.0%} |")
    return int(min(shares) < WANTED)
