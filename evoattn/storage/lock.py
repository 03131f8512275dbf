"""One search per study: a lock that the operating system gives back when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL

from evoattn.model.records import Study
from evoattn.storage.engine import place, sqlite_path
from evoattn.storage.errors import StorageError

_held: set[Path] = set()


def _lock_path(url: URL, study: Study) -> Path:
    """Beside a SQLite file; for a database server in the temporary folder, where it holds for this machine only."""
    if url.get_backend_name() == "sqlite":
        return Path(f"{sqlite_path(url).resolve()}.study-{study.id}.lock")
    key = hashlib.sha256(place(url).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"evoattn-{key}.study-{study.id}.lock")


@contextmanager
def lock_study(url: URL, study: Study) -> Iterator[None]:
    """Hold the study. Raises `StorageError` if another search holds it, or the lock file cannot be made.

    A POSIX record lock: it ends with its process, and a worker forked from it does not inherit it (with flock, a worker
    that outlives a killed search would keep the study locked). The lock file stays: after its removal a third search
    could lock a new one.
    """
    path = _lock_path(url, study)
    busy = StorageError(
        f"Another search is running on study {study.name!r}; wait for it, end it, or start a study of another name."
    )
    if path in _held:  # a record lock does not hold against its own process, and closing the file here would drop it
        raise busy
    try:
        file = path.open("a")
    except OSError as error:
        raise StorageError(
            f"The lock file {path} cannot be made ({error.strerror}); make its folder writable."
        ) from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise busy from None
        _held.add(path)
        try:
            yield
        finally:
            _held.discard(path)
