"""An open database: transactions, and sentences for what goes wrong."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from json import JSONDecodeError
from pathlib import Path
from typing import ClassVar, Self

from sqlalchemy import URL, Connection, Insert, insert, select
from sqlalchemy.exc import DBAPIError

from evoattn.model.paths import data_folder
from evoattn.storage import engine
from evoattn.storage.errors import StorageError, explain
from evoattn.storage.schema import environments


def now() -> str:
    """For a `created_at` column: UTC in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def inserted(connection: Connection, statement: Insert) -> int:
    """The primary key of the row that the statement adds."""
    key = connection.execute(statement).inserted_primary_key
    assert key is not None, "every table has one"
    return int(key[0])


class Database:
    """Rows are only ever added. Every method raises `StorageError` where the database fails it."""

    migrations: ClassVar = engine.Migrations()
    busy_timeout_s: ClassVar = engine.BUSY_TIMEOUT_S

    def __init__(self, url: URL) -> None:
        """Use `open`."""
        self.url = url
        self._engine = engine.connect(url, self.busy_timeout_s)
        self._writer = self._engine.execution_options(writes=True)
        self._environment_id: int | None = None

    @classmethod
    def open(cls, url: str, create: bool = True) -> Self:
        """Open the database at a SQLAlchemy URL or a file path, brought to this version's tables.

        A read-only file serves reading. The user's data folder is made if it is not there yet; no other folder is.
        Raises `StorageError` if the database is missing (and not `create`), another program's, of a newer evoattn, or
        cannot be opened.
        """
        storage = cls(engine.parse_url(url))
        where = engine.place(storage.url)
        if not create and storage.url.get_backend_name() == "sqlite" and not Path(where).exists():
            raise StorageError(
                f"There is no database at {where}; run `evoattn search` first, or choose another with --db."
            )
        if create and Path(where).parent == data_folder():
            data_folder().mkdir(parents=True, exist_ok=True)
        with storage._explained():
            with storage._engine.connect() as connection:
                current = engine.revision(connection, where)
            if current is None and not create:
                raise StorageError(
                    f"The database {where} is empty; run `evoattn search` first, or choose another with --db."
                )
            if current != cls.migrations.revision:
                with storage._writer.begin() as connection:  # asked again: another process may have done it meanwhile
                    if (current := engine.revision(connection, where)) != cls.migrations.revision:
                        engine.migrate(connection, current, where, cls.migrations)
        return storage

    def close(self) -> None:
        """Give back the connections; the object is of no more use."""
        self._engine.dispose()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (DBAPIError, sqlite3.Error) as error:
            raise explain(error, engine.place(self.url)) from None
        except (JSONDecodeError, RecursionError):
            raise StorageError(
                f"The database {engine.place(self.url)} holds a value that is not JSON; use another copy of it."
            ) from None

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self._explained(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """One transaction: all that is written in it is kept, or none."""
        with self._explained(), self._writer.begin() as connection:
            yield connection

    @property
    def place(self) -> str:
        """Where the database is, for people: a path, or a URL without its password."""
        return engine.place(self.url)

    def use_environment(self, facts: dict[str, str]) -> None:
        """All that is recorded from now on ran here. `facts`: what `evoattn.storage.versions.collect` gives."""
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        with self._writing() as connection:
            found = connection.scalar(select(environments.c.id).where(environments.c.hash == key))
            if found is None:
                found = inserted(connection, insert(environments).values(hash=key, facts=facts, created_at=now()))
        self._environment_id = found
