"""A search in a process of its own, and its database held to what was acknowledged."""

import ctypes
import os
import resource
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from evoattn.model import gpu
from evoattn.model.paths import ROOT

SMALL = ("--shape", "B=1,H=1,S=64,D=16", "--family", "flash_scalar", "--jobs", "2")
LIBC = ctypes.CDLL(None)
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2  # linux/prctl.h, linux/capability.h


def environment() -> dict[str, str]:
    """This process's, with the checkout before what is installed."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


class Fault(AssertionError):
    """Something was lost, doubled, corrupted or said unclearly."""


def require(fact: bool, sentence: str) -> None:
    if not fact:
        raise Fault(sentence)


class Run:
    """One database in a folder of its own, with the journal of what its searches were promised."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.db, self.journal = folder / "db.sqlite", folder / "journal"
        self.address = str(self.db)
        """What `--db` is told."""
        self.target = "h100" if kind == "fake" else "auto" if gpu.detect_devices() else "l4"

    def start(self, *words: str, obeys_modes: bool = False, file_bytes: int | None = None) -> subprocess.Popen[str]:
        def limit() -> None:
            if obeys_modes:  # root's right to write everywhere ends at the next exec
                for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
                    LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
            if file_bytes:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        command = [
            sys.executable,
            "-m",
            "tests.faults.search",
            str(self.journal),
            self.kind,
            "--db",
            self.address,
            *words,
        ]
        return subprocess.Popen(
            command,
            env=environment(),
            preexec_fn=limit,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def search(self, budget: str, *words: str, **how: Any) -> subprocess.Popen[str]:
        """A new study in a new database, else a resumed one."""
        if self.db.exists() and self.studies():
            return self.start("--budget", budget, "--jobs", "2", "--resume", *words, **how)
        return self.start("--gpu", self.target, "--budget", budget, *SMALL, *words, **how)

    def lines(self, kind: str) -> list[list[str]]:
        text = self.journal.read_text() if self.journal.exists() else ""
        return [line.split()[1:] for line in text.splitlines() if line.startswith(f"{kind} ")]

    def acknowledged(self) -> dict[int, str]:
        return {int(number): config_id for number, config_id in self.lines("trial")}

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        try:
            with closing(sqlite3.connect(f"file:{self.db}?mode=ro", uri=True, timeout=20)) as connection:
                return connection.execute(query).fetchall()
        except sqlite3.OperationalError as error:  # killed before its first table, or before its first file
            require(
                "no such table" in str(error) or "unable to open" in str(error),
                f"The database cannot be read: {error}.",
            )
            return []

    def studies(self) -> list[tuple[Any, ...]]:
        return self._rows("SELECT name FROM studies")

    def count_of(self, state: str) -> int:
        """Trials that ended so."""
        return sum(found == state for (found,) in self._rows("SELECT state FROM trials"))

    def check(self) -> int:
        """Hold the database to the journal; returns the trials in it."""
        rows = self._rows("SELECT number, study_id, config_id, state FROM trials ORDER BY number")
        kept = {number: config_id for number, _, config_id, _ in rows}
        lost = [n for n, config_id in self.acknowledged().items() if kept.get(n) != config_id]
        require(not lost, f"{len(lost)} acknowledged trials are lost, the first is {lost[:1]}.")
        ours = [(study, config_id) for _, study, config_id, state in rows if state != "DUPLICATE"]
        require(len(ours) == len(set(ours)), f"{len(ours) - len(set(ours))} trials are there twice.")
        self._check_whole()
        return len(kept)

    def _check_whole(self) -> None:
        """By the database's own means."""
        for pragma, answer in (("integrity_check", [("ok",)]), ("foreign_key_check", [])):
            found = self._rows(f"PRAGMA {pragma}") if self.db.exists() else answer
            require(found == answer, f"PRAGMA {pragma} says {found[:2]}.")


def finish(process: subprocess.Popen[str], codes: tuple[int, ...], part: str = "", seconds: float = 180.0) -> str:
    """Wait for a search, hold its exit code and its words to what they should be, and return them."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise Fault(f"The search hangs: {process.communicate()[0][-300:]}") from None
    require(
        process.returncode in codes and "Traceback" not in output and part in output,
        f"Exit code {process.returncode}, expected {codes} with {part!r}: {output[-600:]}",
    )
    return " ".join(output[output.find("evoattn: ") + 9 :].split()) if "evoattn: " in output else ""


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        require(time.monotonic() < end, "It did not happen in time.")
        time.sleep(0.005)


def wait_for_trials(run: Run, process: subprocess.Popen[str], count: int) -> None:
    """Until that many trials are acknowledged, or the search has ended."""
    wait_until(lambda: len(run.acknowledged()) >= count or process.poll() is not None)
