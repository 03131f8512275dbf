"""An open database: transactions, and sentences for what goes wrong."""

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from json import JSONDecodeError
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from sqlalchemy import URL, Connection, Insert, Table, insert, select
from sqlalchemy.exc import StatementError

from evoattn.model.paths import data_folder
from evoattn.storage import engine
from evoattn.storage.errors import DamagedRecord, StorageError, explain
from evoattn.storage.patience import WAIT_S, Patience, Work
from evoattn.storage.schema import environments

_T = TypeVar("_T")


def now() -> str:
    """For a `created_at` column: UTC in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def inserted(connection: Connection, statement: Insert) -> int:
    """The primary key of the row that the statement adds."""
    key = connection.execute(statement).inserted_primary_key
    assert key is not None, "every table has one"
    return int(key[0])


def _make(folder: Path) -> None:
    """Raises `StorageError` where the folder cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"The folder {folder} for the database cannot be made ({error.strerror}); choose a file elsewhere with "
            "--db or EVOATTN_DB."
        ) from None


class Database:
    """Rows are only ever added. Every method raises `StorageError` where the database fails it."""

    migrations: ClassVar = engine.Migrations()
    busy_timeout_s: ClassVar = engine.BUSY_TIMEOUT_S
    wait_s: ClassVar = WAIT_S
    """How long a call waits for a database server that went away."""

    def __init__(self, url: URL) -> None:
        """Use `open`."""
        self.url = url
        self._engine = engine.connect(url, self.busy_timeout_s)
        self._patience = Patience(self._engine, engine.place(url), self.wait_s)
        self._environment_id: int | None = None

    @classmethod
    def open(cls, url: str, create: bool = True) -> Self:
        """Open the database at a SQLAlchemy URL or a file path, brought to this version's tables.

        A read-only file serves reading. The user's data folder is made if it is not there yet; no other folder is.
        Raises `StorageError` if the database is missing (and not `create`), another program's, of a newer evoattn, or
        cannot be opened."""
        storage = cls(engine.parse_url(url))
        where = engine.place(storage.url)
        if not create and storage.url.get_backend_name() == "sqlite" and not Path(where).exists():
            raise StorageError(
                f"There is no database at {where}; run `evoattn search` first, or choose another with --db."
            )
        if storage.url.get_backend_name() == "sqlite" and Path(where).exists() and not Path(where).is_file():
            raise StorageError(f"{where} is no file; choose another one with --db.")
        if create and Path(where).parent == data_folder():
            _make(data_folder())
        with storage._explained():
            with storage._engine.connect() as connection:  # without patience: a wrong URL is to be said at once
                current = engine.revision(connection, where)
            if current is None and not create:
                raise StorageError(
                    f"The database {where} is empty; run `evoattn search` first, or choose another with --db."
                )
            if current != cls.migrations.revision:
                storage._patience.write_again(storage._migrate)
        return storage

    def close(self) -> None:
        """Give back the connections; the object is of no more use."""
        self._engine.dispose()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (StatementError, sqlite3.Error) as error:
            raise explain(error, engine.place(self.url)) from None
        except (JSONDecodeError, RecursionError):
            raise DamagedRecord(
                f"The database {engine.place(self.url)} holds a value that is not JSON; use another copy of it."
            ) from None

    def _migrate(self, connection: Connection) -> None:
        where = engine.place(self.url)
        engine.exclude_others(connection)
        current = engine.revision(connection, where)  # asked again: another process may have done it meanwhile
        if current != self.migrations.revision:
            engine.migrate(connection, current, where, self.migrations)

    def _read(self, work: Work[_T]) -> _T:
        with self._explained():
            return self._patience.read(work)

    def _write(self, work: Work[_T]) -> _T:
        """One transaction: all that is written in it is kept, or none."""
        with self._explained():
            return self._patience.write(work)

    def _insert(self, table: Table, row: dict[str, Any]) -> int:
        """Add one row; its primary key."""
        return self._write(lambda connection: inserted(connection, insert(table).values(row)))

    @property
    def place(self) -> str:
        """Where the database is, for people: a path, or a URL without its password."""
        return engine.place(self.url)

    def use_environment(self, facts: dict[str, str]) -> None:
        """All that is recorded from now on ran here. `facts`: what `evoattn.storage.versions.collect` gives."""
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        row = {"hash": key, "facts": facts, "created_at": now()}

        def find(connection: Connection) -> int:
            engine.insert_missing(connection, environments, [row])
            return int(connection.scalars(select(environments.c.id).where(environments.c.hash == key)).one())

        self._environment_id = self._write(find)
