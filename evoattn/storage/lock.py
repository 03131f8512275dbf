"""One search per study: a lock that the operating system gives back when its holder dies, however it dies."""

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from sqlalchemy import URL, Connection, Engine, func, select
from sqlalchemy.exc import DBAPIError

from evoattn.model.records import Study
from evoattn.storage.engine import sqlite_path
from evoattn.storage.errors import StorageError, explain
from evoattn.storage.patience import Patience

STUDIES = 0x65766F73
"""First key of the advisory locks on studies ("evos"); the second is the study's id."""

_held: set[Path] = set()
_claiming = threading.Lock()


def _busy(study: Study) -> StorageError:
    return StorageError(
        f"Another search is running on study {study.name!r}; wait for it, end it, or start a study of another name."
    )


@contextmanager
def lock_beside_file(url: URL, study: Study) -> Iterator[None]:
    """Hold the study of a SQLite file. Raises `StorageError` if another search holds it, or the lock file cannot be
    made.

    A POSIX record lock: it ends with its process, and a worker forked from it does not inherit it (with flock, a worker
    that outlives a killed search would keep the study locked). The lock file stays: after its removal a third search
    could lock a new one."""
    path = Path(f"{sqlite_path(url).resolve()}.study-{study.id}.lock")
    with _claiming:  # a record lock does not hold against its own process, and closing the file here would drop it
        if path in _held:
            raise _busy(study)
        _held.add(path)
    try:
        with _opened(path) as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise _busy(study) from None
            yield
    finally:
        _held.discard(path)


def _opened(path: Path) -> IO[str]:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise StorageError(
            f"The lock file {path} cannot be made ({error.strerror}); make its folder writable."
        ) from None


@contextmanager
def lock_on_server(patience: Patience, study: Study) -> Iterator[None]:
    """Hold the study of a PostgreSQL database. Raises `StorageError` if another search holds it, or the server is away
    for too long.

    An advisory lock of a connection of its own: the server gives it back when the connection ends, whatever became of
    the process, on whatever machine it ran. A server that restarts forgets it, so each write sees to the connection
    first, and takes the lock again where it is lost."""
    try:
        lock = patience.until_there(lambda: _ServerLock(patience.engine, study))
    except DBAPIError as error:
        raise explain(error, patience.place) from None
    patience.guards.append(lock.keep)
    try:
        yield
    finally:
        patience.guards.remove(lock.keep)
        lock.give_back()


class _ServerLock:
    def __init__(self, engine: Engine, study: Study) -> None:
        self._engine, self._study = engine, study
        self.connection = self._take()

    def _take(self) -> Connection:
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()  # closed for good at the end: in the pool it would keep the lock
        if not connection.scalar(select(func.pg_try_advisory_lock(STUDIES, self._study.id))):
            connection.close()
            raise _busy(self._study)
        return connection

    def keep(self) -> None:
        """Raises `StorageError` if the lock was lost and another search has it."""
        if not self.connection.closed:
            try:
                self.connection.scalar(select(1))
                return
            except DBAPIError:
                self.connection.close()
        self.connection = self._take()

    def give_back(self) -> None:
        """Close the connection. The server notices that some time later, so it is told before."""
        if not self.connection.closed:
            with suppress(DBAPIError):  # a server that is away has forgotten the lock
                self.connection.scalar(select(func.pg_advisory_unlock(STUDIES, self._study.id)))
            self.connection.close()
