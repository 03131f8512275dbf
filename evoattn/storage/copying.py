"""A database moved to another one, of either kind."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Column, Connection, Integer, RowMapping, Select, Table, func, insert, literal_column, select
from sqlalchemy.exc import DBAPIError, StatementError

from evoattn.storage.database import Database
from evoattn.storage.errors import StorageError, explain
from evoattn.storage.patience import is_away, is_postgresql
from evoattn.storage.schema import metadata, writes

ROWS = 500
"""Rows that are read and written at a time."""


def count_rows(connection: Connection, table: Table) -> int:
    """Rows of a table, as its database counts them."""
    return int(connection.scalar(select(func.count()).select_from(table)) or 0)


def copy_database(
    source: Database, target: Database, at_a_time: int = ROWS, count: Callable[[Connection, Table], int] = count_rows
) -> dict[str, int]:
    """Copy all rows; their number by table. Numbers of trials and ids of studies stay the same.

    All of it is one transaction: the target has everything or nothing. A search that goes on in the source meanwhile
    does no harm: what it records later is left out. Raises `StorageError` if the target holds anything, or has not as
    many rows at the end as were read."""

    def copy(reader: Connection) -> dict[str, int]:
        if is_postgresql(reader):  # one state of all tables, as SQLite's transactions see it anyway
            reader.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        try:
            return target._write(lambda writer: _copy(reader, writer, source.place, target.place, at_a_time, count))
        except _SourceAway as lost:
            raise lost.error from None

    return source._read(copy)


class _SourceAway(Exception):
    """Passes through the target's transaction, which would wait for a server of its own."""

    def __init__(self, error: DBAPIError) -> None:
        super().__init__(str(error))
        self.error = error


def _copy(
    reader: Connection,
    writer: Connection,
    origin: str,
    place: str,
    at_a_time: int,
    count: Callable[[Connection, Table], int],
) -> dict[str, int]:
    tables = [table for table in metadata.sorted_tables if table is not writes]  # those that others refer to come first
    for table in tables:
        if held := count(writer, table):
            raise StorageError(
                f"The database {place} is not empty ({held} in its table of {table.name}); copy to a new one."
            )
    copied: dict[str, int] = {}
    for table in tables:
        copied[table.name] = 0
        for page in _pages(reader, origin, table, at_a_time):
            try:
                writer.execute(insert(table), page)
            except StatementError as error:
                if isinstance(error, DBAPIError):
                    raise
                raise explain(error, origin) from None  # what was read there is of another kind than its column
            copied[table.name] += len(page)
        if (there := count(writer, table)) != copied[table.name]:
            raise StorageError(
                f"{copied[table.name]} rows of {table.name} were read and {there} written; nothing was kept."
            )
        if is_postgresql(writer):
            _go_on_after(writer, table)
    return copied


def _key(table: Table) -> Column[Any]:
    (key,) = table.primary_key.columns
    return key


def _pages(reader: Connection, origin: str, table: Table, at_a_time: int) -> Iterator[list[Mapping[str, Any]]]:
    """The rows in the order of their keys. Raises `StorageError` about `origin` where they cannot be read, and
    `_SourceAway`."""
    key = _key(table)
    query = select(table).order_by(key).limit(at_a_time)
    page = _rows(reader, origin, query)
    while page:
        yield [dict(row) for row in page]
        page = _rows(reader, origin, query.where(key > page[-1][key.name]))


def _rows(reader: Connection, origin: str, query: Select[Any]) -> Sequence[RowMapping]:
    try:
        return reader.execute(query).mappings().all()
    except DBAPIError as error:
        if is_away(error):
            raise _SourceAway(error) from None
        raise explain(error, origin) from None


def _go_on_after(writer: Connection, table: Table) -> None:
    """Let the numbering of new rows begin after the last copied one, which PostgreSQL does not see to by itself."""
    key = _key(table)
    if isinstance(key.type, Integer):
        sequence = func.pg_get_serial_sequence(table.name, key.name)
        last = func.coalesce(func.max(key), 1)
        writer.execute(select(func.setval(sequence, last, func.max(key).is_not(literal_column("NULL")))))
