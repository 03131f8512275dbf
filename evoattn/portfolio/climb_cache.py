"""What climbs came to (`climb.climbed`), in memory and in a file, so that a process need not climb where an earlier
one has: a climb, and reading the cost model before the first, take longer than all else of a first call.

A file is of one state of what decides a climb. Its lines are appended, each by one write, so that processes share it;
a line that is not whole has no right checksum. What cannot be read or written costs a climb, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from evoattn.backends.cache_folder import make_folder, mark_used, open_own, read_own, write_whole
from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import SEARCH_SPACES
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio.climb import Climbed

SUFFIX = ".climbs"
MOST_KEPT = 4096
"""In memory."""
MOST_BYTES = 1 << 20
"""Of a file: some 2,000 climbs. Of a larger one the newer half is kept."""
NAME, SUM = 32, 16
"""Characters of a line's first two words."""
PACKAGE = Path(__file__).resolve().parents[1]
ROOMS = ("model", "families", "portfolio", "cost")
"""Whose source files decide what a climb comes to."""
READ_NS = time.time_ns()
"""When this process had read them, or most of them."""

Key = tuple[AttentionProblem, GpuSpec]
"""The canonical problem (`portfolio/canonical.py`), and the GPU."""


def _source_files(folder: str) -> Iterator[tuple[str, int, int]]:
    """Path, size and time of change of each."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir():
                if entry.name not in ("__pycache__", "data"):
                    yield from _source_files(entry.path)
            else:
                about = entry.stat()
                yield entry.path, about.st_size, about.st_mtime_ns


@cache
def what_decides(package: Path = PACKAGE, spaces: Path = SEARCH_SPACES, read_ns: int = READ_NS) -> str:
    """A digest of all that decides what a climb comes to: the portfolios and the cost model's weights, and of source
    files and search spaces path, size and time of change, by which Python, too, knows bytecode that is stale.

    Empty where a source file changed after `read_ns`, since other code runs here than lies on disk. Raises `OSError`.
    """
    sources = [file for room in ROOMS for file in _source_files(str(package / room))]
    if any(changed_ns > read_ns for _, _, changed_ns in sources):
        return ""
    digest = hashlib.sha256(repr(sources).encode())
    digest.update(repr(list(_source_files(str(spaces)))).encode())
    for file in sorted((*(package / "portfolio" / "data").iterdir(), *(package / "cost" / "data").iterdir())):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _name(key: Key) -> bytes:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:NAME].encode()


def _sum(name: bytes, row: bytes) -> bytes:
    return hashlib.sha256(name + row).hexdigest()[:SUM].encode()


class ClimbCache:
    """Ends of climbs by what they began with."""

    def __init__(self, folder: Path | None = None, state: Callable[[], str] = what_decides) -> None:
        """`folder`: where the file lies, or is made; None for memory alone. `state`: as `what_decides`."""
        self._state = state
        self._folder, self._writes = folder, folder is not None
        self._memory: dict[Key, Climbed] = {}
        self._lines: dict[bytes, bytes] | None = None

    @property
    def path(self) -> Path | None:
        """The file of today's state; None for memory alone, and where that state cannot be told."""
        try:
            state = self._state() if self._folder else ""
        except OSError:  # no files, as in an archive, or one that went away while they were looked through
            return None
        return self._folder / f"{state[:NAME]}{SUFFIX}" if self._folder and state else None

    def get(self, key: Key) -> Climbed | None:
        """What this process or an earlier one has added."""
        found = self._memory.get(key)
        if found is None and self._folder is not None:
            if self._lines is None:
                self._lines = self._read()
            name = _name(key)
            if (line := self._lines.get(name)) and (found := _parsed(name, line)):
                self._remember(key, found)
        return found

    def add(self, key: Key, climbed: Climbed) -> None:
        """Keep what a climb came to, on disk too if that can be written."""
        self._remember(key, climbed)
        if not self._writes or (path := self.path) is None:
            return
        config = climbed.config
        row = json.dumps([config.family, config.params, climbed.gain, climbed.asked], separators=(",", ":")).encode()
        name = _name(key)
        # The first newline ends what a process that was killed has left.
        self._writes = _append(path, b"\n" + name + b" " + _sum(name, row) + b" " + row + b"\n")

    def _remember(self, key: Key, found: Climbed) -> None:
        if len(self._memory) >= MOST_KEPT:
            self._memory.clear()
        self._memory[key] = found

    def _read(self) -> dict[bytes, bytes]:
        if (path := self.path) is None:
            return {}
        if (data := read_own(path)) is None:
            return {}
        mark_used(path)
        return {line[:NAME]: line[NAME + 1 :] for line in data.splitlines() if line}


def _parsed(name: bytes, line: bytes) -> Climbed | None:
    """What a line says after its name; None if it is not whole."""
    check, _, row = line.partition(b" ")
    if check != _sum(name, row):
        return None
    family, params, gain, asked = json.loads(row)
    return Climbed(KernelConfig(family, params), gain, asked)


def _append(path: Path, line: bytes) -> bool:
    """Whether the line was written."""
    try:
        make_folder(path.parent)
        handle = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if handle is None:
            return False
        try:
            if os.fstat(handle).st_size + len(line) > MOST_BYTES:
                kept = path.read_bytes().splitlines(keepends=True)
                return write_whole(path, b"".join(kept[len(kept) // 2 :]) + line)
            return os.write(handle, line) == len(line)
        finally:
            os.close(handle)
    except OSError:
        return False
