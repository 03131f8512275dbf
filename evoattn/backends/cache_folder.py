"""Files of a cache folder that several processes share: put in place whole, and removed where they are too many."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from evoattn.model.whole_file import TEMPORARY, replace_file

LIMIT = "EVOATTN_CACHE_GB"
"""The variable with the most gigabytes (10^9 bytes) that a folder of compiled kernels may hold."""
USUAL_GB = 4.0
OWN = 0o600
"""Permissions of a file: what lies in a cache is run, so that only its owner may write there."""
AFTER_PRUNING = 0.8
"""Of the limit: so much is left, so that not every later file makes one too many."""
SUFFIXES = (".kernel", ".check", ".climbs")
"""Of files that may be removed; the user may have chosen a folder with others in it."""
DAY_S, HOUR_S, BETWEEN_S = 86400, 3600, 600
MARK = ".pruned"
"""The file that says, by the time of its last change, when a folder was last looked through."""


def write_whole(path: Path, data: bytes) -> bool:
    """Put a file in place whole, or not at all: whether it is there. A disk that is full or read-only costs the cache,
    nothing else."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, OWN)
        return True
    except OSError:
        return False


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
    Safe beside processes that read and write there: who misses a file makes it again.
    """
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
