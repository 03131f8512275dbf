"""Problems shared by processes, as compilers of peers take most of the time: each has its own problems, and the device
for itself while it times."""

import contextlib
import fcntl
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.flex.problems import Problem


def shares(problems: Sequence[Problem], count: int) -> list[list[int]]:
    """The places of the problems of each process, in their order: those that a peer compiles one kernel for together,
    the largest such groups first, each to who has least."""
    groups: dict[tuple[str, int, bool], list[int]] = {}
    for place, problem in enumerate(problems):
        groups.setdefault(problem.compiled_as, []).append(place)
    found: list[list[int]] = [[] for _ in range(count)]
    for places in sorted(groups.values(), key=len, reverse=True):
        min(found, key=len).extend(places)
    return [sorted(places) for places in found]


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """A block in which no other process of this run times; none without a lock."""
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


LAST_SECONDS = 40
"""Of a process that may begin no more problems."""
ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Else each process starts as many as there are cores."""


def run_all(module: str, arguments: Sequence[str], count: int, seconds: float) -> Iterator[Path]:
    """Run so many processes of a module with these arguments and `--share I/N --lock FILE --json FILE`, for so long and
    `LAST_SECONDS`; the files that they wrote."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        lock = "--lock", str(home / "lock")
        parts = [home / f"{number}.json" for number in range(count)]
        words = sys.executable, "-m", module, *arguments, *lock
        runs = [
            subprocess.Popen(
                [*words, "--share", f"{number}/{count}", "--json", str(part)], env=os.environ | ONE_COMPILER
            )
            for number, part in enumerate(parts)
        ]
        end = time.monotonic() + seconds + LAST_SECONDS
        for run in runs:
            try:
                run.wait(None if math.isinf(end) else max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                run.kill()
        yield from (part for part in parts if part.exists())
