"""Transactions on a server that may go away and come back: they wait for it, and none is done twice."""

import itertools
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from threading import Lock
from typing import Generic, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from evoattn.storage.schema import writes

_T = TypeVar("_T")
Work = Callable[[Connection], _T]
"""Runs in one transaction. It may run again, after none of its writes was kept."""

WAIT_S = 120.0
"""How long a call waits for a server that is away: a restart takes seconds, a reboot a minute or two."""
PAUSE_S = 0.5
"""Between two tries."""
_AWAY = ("08", "57P01", "57P02", "57P03")
"""SQLSTATEs of PostgreSQL (appendix A of its manual): connection exceptions, shutdowns, and a server that is not up
yet."""

_CROSSED = ("40001", "40P01")
"""SQLSTATEs of a transaction that was undone in favour of another one, such as two that add the same two sources in
opposite order: it is run again."""


def say(sentence: str) -> None:
    """One line on stderr."""
    print(f"evoattn: {sentence}", file=sys.stderr, flush=True)


@dataclass
class Patience:
    """Reads and writes through `engine`; a database file is never away."""

    engine: Engine
    place: str
    wait_s: float = WAIT_S
    tell: Callable[[str], None] = say
    pause_s: float = PAUSE_S
    guards: list[Callable[[], None]] = field(default_factory=list)
    """Called before each write. What they raise ends the call."""
    _writer: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The key of this program's row in `writes`."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _turn: Lock = field(default_factory=Lock)
    """Held while a write may be in doubt: the row has room for one number."""

    def read(self, work: Work[_T]) -> _T:
        """The answer of `work`, in a transaction that writes nothing."""

        def once() -> _T:
            with self.engine.connect() as connection:
                return work(connection)

        return self.until_there(once)

    def write(self, work: Work[_T]) -> _T:
        """The answer of `work`, in a transaction that is kept once and whole, or not at all. Threads take turns."""
        with self._turn:
            return self.until_there(_Write(self._writing(), self.guards, work, self._writer, next(self._numbers)))

    def write_again(self, work: Work[_T]) -> _T:
        """The answer of `work`, in a transaction that does no harm if it is kept twice: it needs none of our tables."""

        def once() -> _T:
            with self._writing().begin() as connection:
                return work(connection)

        return self.until_there(once)

    def _writing(self) -> Engine:
        return self.engine.execution_options(writes=True)

    def until_there(self, once: Callable[[], _T]) -> _T:
        """The answer of `once`, called again while the server is away."""
        lost, end = False, 0.0
        while True:
            try:
                return once()
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) in _CROSSED:
                    continue
                if not is_away(error):
                    raise
                if not lost:  # perhaps the line alone was cut, as of a connection that was idle for long
                    lost = True
                    continue
                if not end:
                    end = time.monotonic() + self.wait_s
                    self.tell(f"The database {self.place} does not answer; waiting up to {self.wait_s:.0f} s for it.")
                elif time.monotonic() > end:
                    raise
                time.sleep(self.pause_s)


class _Write(Generic[_T]):
    """One transaction. Where the connection is lost while it commits, nobody here knows whether it was kept, so it
    leaves its number in the row of its writer: where that is there, it is not done again.

    PostgreSQL's own numbers of transactions do not tell: after a crash of the server, another transaction may have the
    number of one that was lost."""

    def __init__(
        self, engine: Engine, guards: list[Callable[[], None]], work: Work[_T], writer: str, number: int
    ) -> None:
        self._engine, self._guards, self._work = engine, guards, work
        self._writer, self._number = writer, number
        self._answers: list[_T] = []
        """Of each time that `work` came to its end."""

    def __call__(self) -> _T:
        for guard in self._guards:
            guard()
        with self._engine.begin() as connection:
            if not is_postgresql(connection) or self._is_first(connection):
                self._answers.append(self._work(connection))
        return self._answers[-1]

    def _is_first(self, connection: Connection) -> bool:
        """Whether no transaction with this number was kept. Waits for one that a server has not ended yet, as where it
        has not noticed that the connection is lost."""
        from sqlalchemy.dialects.postgresql import insert  # imports all of its drivers' dialects

        row = insert(writes).values(writer=self._writer, number=self._number)
        changed = row.on_conflict_do_update(
            index_elements=[writes.c.writer], set_={"number": self._number}, where=writes.c.number != self._number
        )
        return connection.scalar(changed.returning(writes.c.number)) is not None


def is_postgresql(connection: Connection) -> bool:
    """Whether a PostgreSQL server answers on the other side, not SQLite."""
    return connection.dialect.name == "postgresql"


def is_away(error: DBAPIError) -> bool:
    """Whether the server is gone, is going or is not up yet."""
    code = getattr(error.orig, "sqlstate", "no server")  # None: the connection itself failed, so nobody sent a code
    return code is None or (code != "no server" and str(code).startswith(_AWAY))
