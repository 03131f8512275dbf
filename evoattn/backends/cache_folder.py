"""Files of a cache folder that several processes share: put in place whole, read only where nobody else can have
written them, and removed where they are too many."""

import json
import os
import stat
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from evoattn.model.whole_file import TEMPORARY, replace_file

LIMIT = "EVOATTN_CACHE_GB"
"""The variable with the most gigabytes (10^9 bytes) that a folder of compiled kernels may hold."""
USUAL_GB = 4.0
OWN = 0o600
"""Permissions of a file: what lies in a cache is run, so that only its owner may write there."""
OWN_FOLDER = 0o700
"""Permissions of a folder that is made here, for the same reason."""
OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
AFTER_PRUNING = 0.8
"""Of the limit: so much is left, so that not every later file makes one too many."""
KERNEL = ".kernel"
"""How the name of a file ends that has one line of JSON about what is compiled, then that."""
OPTIONS = ("--std=c++17", "-default-device", "--minimal", "--ptxas-options=-v", "--no-cache")
"""Of NVRTC, which such names cover. Its declarations of textures and of launches by kernels, of which ours have
none, take 30 ms of each compile; its own cache would answer a repeated one without the log that says registers and
spills."""
SUFFIXES = (KERNEL, ".check", ".climbs")
"""Of files that may be removed; the user may have chosen a folder with others in it."""
DAY_S, HOUR_S, BETWEEN_S = 86400, 3600, 600
MARK = ".pruned"
"""The file that says, by the time of its last change, when a folder was last looked through."""


def write_whole(path: Path, data: bytes) -> bool:
    """Put a file in place whole, or not at all: whether it is there. A disk that is full or read-only costs the cache,
    nothing else."""
    try:
        make_folder(path.parent)
        replace_file(path, data, OWN)
        return True
    except OSError:
        return False


def make_folder(folder: Path) -> None:
    """Make what is missing of a folder's path, for its owner alone. Raises `OSError`."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(OWN_FOLDER, exist_ok=True)


def open_own(path: Path, flags: int = os.O_RDONLY) -> int | None:
    """A descriptor of a file that nobody else can have written; the caller closes it. None where there is no file, and,
    with a warning, for a symbolic link, a file or folder of another user (root's may stay), and one that others may
    write.

    With `os.O_CREAT` among `flags` a missing file is made. Raises no error."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        if why := _of_others(os.fstat(folder)):
            _pass_over(path.parent, f"it {why}")
            return None
        # Not through a link, and without waiting for the other end of a pipe.
        handle = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, OWN, dir_fd=folder)
    except OSError:
        if path.is_symlink():
            _pass_over(path, "it is a symbolic link")
        return None
    finally:
        os.close(folder)
    about = os.fstat(handle)
    why = _of_others(about) if stat.S_ISREG(about.st_mode) else "is no regular file"
    if not why:
        return handle
    os.close(handle)
    _pass_over(path, f"it {why}")
    return None


def read_own(path: Path) -> bytes | None:
    """What is in a file that nobody else can have written (`open_own`); None where it cannot be read."""
    handle = open_own(path)
    if handle is None:
        return None
    try:
        with os.fdopen(handle, "rb") as file:
            return file.read()
    except OSError:
        return None


def read_headed(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """The first line of such a file, a table in JSON, empty where it is none; and what follows. None where the file
    cannot be read."""
    data = read_own(path)
    if data is None:
        return None
    line, _, rest = data.partition(b"\n")
    try:
        head = json.loads(line)
    except (ValueError, RecursionError):
        head = None
    return (head if isinstance(head, dict) else {}), rest


def write_headed(path: Path, head: Mapping[str, Any], rest: bytes) -> bool:
    """As `write_whole`, for `read_headed`."""
    return write_whole(path, json.dumps(head).encode() + b"\n" + rest)


def _of_others(about: os.stat_result) -> str:
    """Why a file or folder is not trusted; empty if it is."""
    if about.st_uid not in (os.geteuid(), 0):
        return f"belongs to the user {about.st_uid}"
    return "may be written by other users (`chmod go-w` ends that)" if about.st_mode & OF_OTHERS else ""


def _pass_over(path: Path, why: str) -> None:
    words = f"evoattn: {path} is passed over, as {why}; what it holds is made anew."
    warnings.warn(words, RuntimeWarning, stacklevel=4)


def mark_used(path: Path) -> None:
    """Set the time of a file that was read to now, at most once a day: those of the longest ago are removed first."""
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > DAY_S:
            os.utime(path)


def limit_bytes() -> int:
    """`EVOATTN_CACHE_GB` in bytes; 4 GB where it is not set or no number."""
    try:
        return int(float(os.environ.get(LIMIT) or USUAL_GB) * 1e9)
    except (ValueError, OverflowError):
        return int(USUAL_GB * 1e9)


def keep_small(folder: Path) -> None:
    """Remove the files of `folder` and the folders below that were used longest ago, if all are over the limit.

    Looks at most every ten minutes, whatever the number of processes, so a folder may grow beyond the limit between.
    Safe beside processes that read and write there: who misses a file makes it again."""
    mark, now = folder / MARK, time.time()
    with suppress(OSError):
        if now - mark.stat().st_mtime < BETWEEN_S:
            return
    with suppress(OSError):
        mark.touch()
        _prune(folder, now)


def _prune(folder: Path, now: float) -> None:
    files: list[tuple[float, int, str]] = []
    for where, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(where, name)
            with suppress(OSError):  # another process may have removed it
                about = os.stat(path)
                if name.endswith(SUFFIXES):
                    files.append((about.st_mtime, about.st_size, path))
                elif name.endswith(TEMPORARY) and now - about.st_mtime > HOUR_S:  # of a process that was killed
                    os.unlink(path)
    size, limit = sum(bytes_ for _, bytes_, _ in files), limit_bytes()
    if size <= limit:
        return
    for _, bytes_, path in sorted(files):
        if size <= limit * AFTER_PRUNING:
            break
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError:  # of another user, perhaps: the next oldest goes instead
            continue
        size -= bytes_
