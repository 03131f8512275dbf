"""A file of lines that several processes append to and read: each line is one write, and has a checksum, so that one
that is not whole is passed over. Plain data: a name and a JSON value a line."""

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from evoattn.backends.cache_folder import make_folder, open_own, read_own, write_whole

MOST_BYTES = 1 << 20
"""Of a file, unless said: some 2,000 lines. Of a larger one the newer half is kept."""
NAME, SUM = 32, 16
"""Characters of a line's first two words."""


def name_of(key: object) -> bytes:
    """What a line about `key` begins with."""
    return hashlib.sha256(repr(key).encode()).hexdigest()[:NAME].encode()


def _sum(name: bytes, row: bytes) -> bytes:
    return hashlib.sha256(name + row).hexdigest()[:SUM].encode()


def read(path: Path) -> dict[bytes, bytes]:
    """The lines by their names, of one name the last; none where there is no file that can be trusted."""
    data = read_own(path)
    return {line[:NAME]: line[NAME + 1 :] for line in (data or b"").splitlines() if line}


def parsed(name: bytes, line: bytes) -> Any:
    """The value of a line after its name; None if it is not whole."""
    check, _, row = line.partition(b" ")
    return json.loads(row) if check == _sum(name, row) else None


def append(path: Path, name: bytes, value: Any, most_bytes: int = MOST_BYTES) -> bool:
    """Whether the line was written; nothing is raised where it cannot be. `most_bytes`: of the file."""
    row = json.dumps(value, separators=(",", ":")).encode()
    # The first newline ends what a process that was killed has left.
    line = b"\n" + name + b" " + _sum(name, row) + b" " + row + b"\n"
    try:
        make_folder(path.parent)
        handle = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if handle is None:
            return False
        try:
            if os.fstat(handle).st_size + len(line) > most_bytes:
                fcntl.flock(handle, fcntl.LOCK_EX)  # of several that find it too long one makes it shorter at a time
                kept = path.read_bytes().splitlines(keepends=True)
                return write_whole(path, b"".join(kept[len(kept) // 2 :]) + line)
            return os.write(handle, line) == len(line)
        finally:
            os.close(handle)
    except OSError:
        return False


class Lines:
    """Values by key: those of a file, read again where another process has changed it, and those of this process that
    could not be written there. Not safe without a lock among threads."""

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        """`path` need not exist; `most_bytes`: as of `append`."""
        self._path, self._most = path, most_bytes
        self._unwritten: dict[bytes, Any] = {}
        self._lines: dict[bytes, bytes] = {}
        self._read_at: tuple[int, ...] = ()

    def get(self, key: object) -> Any:
        """The last value of `key`; None where there is none, or none that is whole."""
        name = name_of(key)
        if name in self._unwritten:
            return self._unwritten[name]
        try:
            about = self._path.stat()
            now: tuple[int, ...] = (about.st_mtime_ns, about.st_size, about.st_ino)
        except OSError:
            now = ()
        if now != self._read_at:
            self._read_at, self._lines = now, read(self._path)
        return parsed(name, self._lines[name]) if name in self._lines else None

    def add(self, key: object, value: Any) -> bool:
        """Whether the value, and all that could not be written before it, was written."""
        self._unwritten[name_of(key)] = value
        for name, one in list(self._unwritten.items()):
            if not append(self._path, name, one, self._most):
                return False
            del self._unwritten[name]
        return True
