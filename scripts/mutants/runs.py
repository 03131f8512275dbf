"""Runs the tests of a room on a copy of the sources, once per mutant."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from mutants.rooms import ROOMS, ROOT, Mutant

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
