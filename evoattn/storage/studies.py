"""The studies of a database; one search per study, by a lock that the operating system gives back when its holder
dies, however it dies."""

import fcntl
import shlex
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from sqlalchemy import URL, Connection, Engine, Select, exists, func, select
from sqlalchemy.exc import DBAPIError

from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.gpu_table import GPU_ROW
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import SM_COUNT, Study
from evoattn.storage.database import Database, now
from evoattn.storage.engine import sqlite_path
from evoattn.storage.errors import AlreadyThere, StorageError, UnknownRecord, explain
from evoattn.storage.patience import Patience
from evoattn.storage.rows import Row, plain_text, study_from_row
from evoattn.storage.schema import studies, trials

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


NAMED_STUDIES = 10
"""Studies that a sentence about an unknown one names."""


class Studies(Database):
    """Making, finding and holding studies."""

    def create_study(
        self,
        name: str,
        problem: AttentionProblem,
        gpu: GpuSpec,
        offline: bool,
        sampler: str,
        seed: int,
        families: Sequence[str],
        versions: dict[str, str],
        options: dict[str, Any],
    ) -> Study:
        """Record a new study. Raises `AlreadyThere` if the name is taken, `StorageError` if a value is not of its
        kind."""
        row = {
            "name": name,
            "gpu": gpu.name,
            "arch": gpu.arch,
            "offline": offline,
            "sampler": sampler,
            "seed": seed,
            "problem": problem.to_dict(),
            "families": list(families),
            "versions": versions,
            "options": options | {SM_COUNT: gpu.sm_count} | ({} if gpu.name in GPUS else {GPU_ROW: asdict(gpu)}),
            "created_at": now(),
        }
        study = study_from_row({"id": 0, **row})  # first: a row that cannot be read would stay there
        try:
            study_id = self._insert(studies, row)
        except AlreadyThere:
            raise AlreadyThere(
                f"The study {name!r} is there already; choose another name, or go on with it by `evoattn search "
                f"--resume --study {shlex.quote(name)}`."
            ) from None
        return replace(study, id=study_id)

    def studies(self) -> list[Study]:
        """All studies, oldest first. One that is damaged is passed over with a warning, as the others are whole."""
        found = []
        for row in self._rows(select(studies).order_by(studies.c.id)):
            try:
                found.append(study_from_row(row))
            except StorageError as error:
                warnings.warn(f"Passed over: {error}", RuntimeWarning, stacklevel=2)
        return found

    def study_names(self) -> list[str]:
        """Of all studies, oldest first, damaged ones too."""
        names = self._read(lambda c: c.scalars(select(studies.c.name).order_by(studies.c.id)).all())
        return [plain_text(name) for name in names]

    def create_numbered(self, stem: str, create: Callable[[str], Study]) -> Study:
        """What `create`, a call of `create_study`, makes under a `free_name` of `stem`, also where other processes take
        names at the same time. Raises what `create` raises."""
        refused = ""
        while True:
            name = self.free_name(stem)
            try:
                return create(name)
            except AlreadyThere:
                if name == refused:  # it is not the name that is there already
                    raise
                refused = name

    def free_name(self, stem: str) -> str:
        """`stem`, or `stem_2`, `stem_3` …: the first that no study is called."""
        taken = set(self.study_names())
        return next(n for n in (stem, *(f"{stem}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)

    def study(self, study_id: int) -> Study:
        """The study with this id, as trials name it. Raises `UnknownRecord`."""
        for study in self._select_studies(select(studies).where(studies.c.id == study_id)):
            return study
        raise UnknownRecord(f"There is no study {study_id} in {self.place}; `evoattn report` shows the latest.")

    def find_study(self, name: str) -> Study | None:
        """The study called `name`, if it is there. None for a name that is no text, as none can be called so."""
        if not _is_text(name):
            return None
        return next(iter(self._select_studies(select(studies).where(studies.c.name == name))), None)

    def latest_study(self) -> Study | None:
        """The latest study that has a trial, else the latest of all; None in an empty database."""
        tried = exists().where(trials.c.study_id == studies.c.id)
        query = select(studies).order_by(tried.desc(), studies.c.id.desc()).limit(1)
        return next(iter(self._select_studies(query)), None)

    def chosen_study(self, name: str | None) -> Study:
        """The study called `name`, else the latest. Raises `UnknownRecord`, which names those that are there."""
        if study := self.find_study(name) if name else self.latest_study():
            return study
        place, names = self.place, self.study_names()
        if not names:
            raise UnknownRecord(f"There is no study in {place} yet; start with `evoattn search`.")
        has = "it has" if len(names) <= NAMED_STUDIES else "its latest are"
        raise UnknownRecord(f"There is no study {name!r} in {place}; {has} {', '.join(names[-NAMED_STUDIES:])}.")

    def _select_studies(self, query: Select[Any]) -> list[Study]:
        return [study_from_row(row) for row in self._rows(query)]

    def _rows(self, query: Select[Any]) -> Sequence[Row]:
        return self._read(lambda c: c.execute(query).mappings().all())

    def lock_study(self, study: Study) -> AbstractContextManager[None]:
        """Hold the study for one search, until the context or the process ends.

        Raises `StorageError` if another search holds it."""
        if self.url.get_backend_name() == "sqlite":
            return lock_beside_file(self.url, study)
        return lock_on_server(self._patience, study)


def _is_text(name: str) -> bool:
    """Whether drivers can send it: a byte of a command line that is not of the locale's encoding is half a surrogate
    pair in Python, and PostgreSQL has no NUL."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in name
