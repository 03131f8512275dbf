"""Races of kernels that nobody measured on such a card with PyTorch's attention, kept in the data folder."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from evoattn.backends import appended
from evoattn.model.paths import data_folder

RACES_FILE = "races/races.jsonl"
"""In the data folder: a folder of its own, which nobody else may write."""
FASTER = 0.98
"""A kernel runs if it takes at most this part of PyTorch's time: less is within what a race of ten calls can tell."""

PATIENCE = 2.0
"""Seconds: a race takes 30 ms, and what PyTorch loads at first use."""

Key = tuple[object, ...]


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True)
class Raced:
    """Times per call in µs."""

    us: float
    torch_us: float

    @property
    def won(self) -> bool:
        return self.us <= FASTER * self.torch_us

    def __str__(self) -> str:
        return f"{self.us:.1f} µs beside {self.torch_us:.1f} µs of PyTorch's"


class Races:
    """The races of a file, and those of this process where it cannot be written."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the user's own unless given. It need not exist."""
        self.path = path or data_folder() / RACES_FILE
        self._mine: dict[bytes, Raced] = {}
        self._lines: dict[bytes, bytes] = {}
        self._size = -1

    def find(self, key: Key) -> Raced | None:
        """The race of `key`, in this process or, as far as its file says, another one."""
        name = appended.name_of(key)
        if name in self._mine:
            return self._mine[name]
        self._refresh()
        row = appended.parsed(name, self._lines[name]) if name in self._lines else None
        if not (isinstance(row, list) and len(row) == 2 and all(isinstance(us, (int, float)) and us > 0 for us in row)):
            return None
        return self._mine.setdefault(name, Raced(*row))

    def add(self, key: Key, raced: Raced) -> None:
        """Keep it, on disk too if that can be written."""
        name = appended.name_of(key)
        self._mine[name] = raced
        appended.append(self.path, name, [round(raced.us, 3), round(raced.torch_us, 3)])

    @contextlib.contextmanager
    def turn(self, patience: float = PATIENCE) -> Iterator[None]:
        """Within it no other process that shares the file races: two at once would slow one another down. Who has
        waited so many seconds, or cannot lock the file, goes on."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(self.path.with_suffix(".lock").open("w", encoding="utf-8"))
                until = time.monotonic() + patience
                while not _locked(file) and time.monotonic() < until:
                    time.sleep(0.002)
            yield

    def _refresh(self) -> None:
        """Read the file where it has changed its size."""
        try:
            size = self.path.stat().st_size
        except OSError:
            size = -1
        if size != self._size:
            self._size, self._lines = size, appended.read(self.path)
