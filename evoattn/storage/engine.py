"""Opening a database: its URL, SQLite's settings, read-only files, and the migration to this version's tables."""

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    ExceptionContext,
    Table,
    column,
    create_engine,
    event,
    func,
    inspect,
    make_url,
    select,
    table,
)
from sqlalchemy.exc import ArgumentError

from evoattn.model.paths import MIGRATIONS
from evoattn.storage.errors import StorageError
from evoattn.storage.patience import is_postgresql
from evoattn.storage.schema import REVISION, VERSION_TABLE

POSTGRESQL = "postgresql+psycopg"
"""psycopg 3, which `evoattn[postgres]` brings."""
BUSY_TIMEOUT_S = 10.0
"""How long a call waits for another program's write; ours take milliseconds."""


BETWEEN_SIGNALS = 1_000_000
"""Steps of SQLite's machine, some 10 ms, after which signals are seen to."""
CONNECT_S = 10
"""How long a server may take to accept a connection."""
BEFORE_RELEASES = frozenset(("0001", "0002", "0003"))
"""Revisions of tables that no release wrote and no migration reads."""
MIGRATION_LOCK = 0x65766F61
"""Key of the advisory lock under which tables are made and migrated ("evoa")."""
_migrating = Lock()
"""Alembic's context is one for the whole process: a second thread would migrate the first one's database."""


def parse_url(text: str) -> URL:
    """A SQLAlchemy URL; a bare path is a SQLite file, and PostgreSQL's own `postgresql://` means psycopg. Raises
    `StorageError`."""
    try:
        url = make_url(text if "://" in text else f"sqlite:///{Path(text).absolute()}")
    except ArgumentError:
        raise StorageError(f"{text!r} is neither a file nor a database URL such as sqlite:///evoattn.sqlite.") from None
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise StorageError("A study must outlive its process; give --db a file.")
    if url.get_backend_name() == "sqlite" and url.query:
        raise StorageError(
            f"A SQLite database is named by its file alone; {text!r} has options behind a question mark."
        )
    if url.drivername == "postgresql":
        return url.set(drivername=POSTGRESQL)
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise StorageError(f"evoattn keeps its tables in SQLite or PostgreSQL, not in {url.get_backend_name()!r}.")
    return url


def place(url: URL) -> str:
    """What to call the database in a sentence: its path, or its URL without the password."""
    return str(url.database) if url.get_backend_name() == "sqlite" else url.render_as_string(hide_password=True)


def without_password(text: str) -> str:
    """A value of --db as it may be shown and pasted; libpq finds a password in `~/.pgpass` or `PGPASSWORD`."""
    if "://" not in text:
        return text
    url = make_url(text)
    if url.password is None:
        return text
    bare = URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query)
    return bare.render_as_string()


def sqlite_path(url: URL) -> Path:
    """The file of a SQLite URL of `parse_url`."""
    return Path(str(url.database))


def is_read_only(url: URL) -> bool:
    """True for a SQLite file that may be read but not written; WAL also needs the right to write beside it."""
    if url.get_backend_name() != "sqlite":
        return False
    path = sqlite_path(url)
    return path.exists() and not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK))


def _read_only_url(url: URL) -> URL:
    """SQLite opens a WAL file without write access only if it may use the -wal and -shm files that are there, or is
    told that nothing changes the file (`immutable`, sqlite.org/wal.html §5)."""
    path = sqlite_path(url).absolute()
    mode = {"mode": "ro"} if Path(f"{path}-wal").exists() else {"immutable": "1"}
    return url.set(database=f"file:{quote(str(path))}", query={**url.query, **mode, "uri": "true"})


@dataclass(frozen=True)
class Migrations:
    """Alembic's scripts in `folder`, the newest of which brings tables to `revision`."""

    revision: str = REVISION
    folder: Path = MIGRATIONS


def connect(url: URL, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Engine:
    """An engine with evoattn's settings. Raises `StorageError` where the URL names no driver that is installed."""
    is_file = url.get_backend_name() == "sqlite"
    read_only = is_read_only(url)
    try:
        engine = create_engine(
            _read_only_url(url) if read_only else url,
            connect_args={"timeout": busy_timeout_s} if is_file else {"connect_timeout": CONNECT_S},
        )
    except (ArgumentError, ImportError) as error:
        raise StorageError(
            f"No driver for the database {place(url)} is installed ({error}); `pip install 'evoattn[postgres]'` brings "
            "PostgreSQL's."
        ) from None
    if is_file:
        event.listen(engine, "connect", _set_up_reading if read_only else _set_up)
        event.listen(engine, "begin", _begin)
        event.listen(engine, "handle_error", _interrupted)
    return engine


def _go_on() -> int:
    return 0


def _interrupted(context: ExceptionContext) -> None:
    """SQLite's word for it where a handler of a signal raised `KeyboardInterrupt` within `_go_on`."""
    if str(context.original_exception) == "interrupted":
        raise KeyboardInterrupt


def _set_up_reading(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # _begin begins; Python's own way leaves DDL outside transactions
    # A database from elsewhere may have queries without an end: Python's handlers of Ctrl-C and SIGTERM run in between.
    connection.set_progress_handler(_go_on, BETWEEN_SIGNALS)
    # A database from elsewhere may define views and triggers: they may call no functions.
    connection.execute("PRAGMA trusted_schema=OFF")


def _set_up(connection: sqlite3.Connection, record: object) -> None:
    _set_up_reading(connection, record)
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute("PRAGMA journal_mode=WAL")
    # NORMAL would survive kill -9 too, but lose the last minutes at a power cut. FULL is one fsync per trial: 0.3 ms
    # to some 10 ms, where a trial takes 250 ms and more.
    connection.execute("PRAGMA synchronous=FULL")


def _begin(connection: Connection) -> None:
    # IMMEDIATE takes the write lock at the start, where SQLite waits for it; a reader that turns writer is refused at
    # once.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")


def exclude_others(connection: Connection) -> None:
    """Until the transaction ends, nobody else is in here. SQLite's `BEGIN IMMEDIATE` has seen to it."""
    if is_postgresql(connection):
        connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))


def insert_missing(connection: Connection, into: Table, rows: list[dict[str, Any]]) -> None:
    """Add each row unless one of its primary or unique key is there, also where another program adds it meanwhile."""
    if is_postgresql(connection):
        from sqlalchemy.dialects.postgresql import insert  # imports all of its drivers' dialects

        connection.execute(insert(into).on_conflict_do_nothing(), rows)
    else:
        from sqlalchemy.dialects import sqlite

        connection.execute(sqlite.insert(into).on_conflict_do_nothing(), rows)


def revision(connection: Connection, where: str) -> str | None:
    """The database's revision; None if it has no tables at all. Raises `StorageError` if it is not evoattn's."""
    names = inspect(connection).get_table_names()
    if not names:
        return None
    if VERSION_TABLE not in names:
        raise StorageError(
            f"{where} is some other program's database (it has the table {names[0]!r}); choose another one with --db."
        )
    found: str | None = connection.scalar(select(column("version_num")).select_from(table(VERSION_TABLE)))
    return found


def migrate(connection: Connection, current: str | None, where: str, migrations: Migrations) -> None:
    """Bring the tables to the newest revision, in the connection's transaction. Raises `StorageError` if they are not
    older."""
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(migrations.folder))
    known = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    if current in BEFORE_RELEASES:
        raise StorageError(
            f"The database {where} is of an evoattn before the first release (its tables are at {current}), which no "
            "evoattn reads any more; choose another one with --db, and search again."
        )
    if current is not None and current not in known:
        raise StorageError(
            f"The database {where} was written by another version of evoattn (its tables are at {current}, "
            f"this one's at {migrations.revision}); update evoattn, or choose another database with --db."
        )
    config.attributes["connection"] = connection
    with _migrating:
        command.upgrade(config, "head")
