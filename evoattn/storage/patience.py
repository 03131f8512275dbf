"""Transactions on a server that may go away and come back: they wait for it, and none is done twice."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DBAPIError

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
    guards: list[Callable[[], None]] = field(default_factory=list)
    """Called before each write. What they raise ends the call."""

    def read(self, work: Work[_T]) -> _T:
        """The answer of `work`, in a transaction that writes nothing."""

        def once() -> _T:
            with self.engine.connect() as connection:
                return work(connection)

        return self.until_there(once)

    def write(self, work: Work[_T]) -> _T:
        """The answer of `work`, in a transaction that is kept whole or not at all."""
        return self.until_there(_Write(self.engine.execution_options(writes=True), self.guards, work))

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
                time.sleep(PAUSE_S)


class _Write(Generic[_T]):
    """One transaction. Where the connection is lost while it commits, nobody here knows whether it was kept: the server
    is asked by the transaction's number before it runs again."""

    def __init__(self, engine: Engine, guards: list[Callable[[], None]], work: Work[_T]) -> None:
        self._engine, self._guards, self._work = engine, guards, work
        self._uncertain: tuple[int, _T] | None = None
        """A transaction that may have been kept: its number and its answer."""

    def __call__(self) -> _T:
        if self._uncertain and self._was_kept(self._uncertain[0]):
            return self._uncertain[1]
        self._uncertain = None
        for guard in self._guards:
            guard()
        with self._engine.begin() as connection:
            answer = self._work(connection)
            if is_postgresql(connection):
                self._uncertain = int(connection.scalar(text("SELECT txid_current()")) or 0), answer
        return answer

    def _was_kept(self, number: int) -> bool:
        while True:
            with self._engine.connect() as connection:
                status = connection.scalar(text("SELECT txid_status(:number)"), {"number": number})
            if status != "in progress":  # as it is while the server has not noticed that the connection is lost
                return bool(status == "committed")
            time.sleep(PAUSE_S)


def is_postgresql(connection: Connection) -> bool:
    """Whether a PostgreSQL server answers on the other side, not SQLite."""
    return connection.dialect.name == "postgresql"


def is_away(error: DBAPIError) -> bool:
    """Whether the server is gone, is going or is not up yet."""
    code = getattr(error.orig, "sqlstate", "no server")  # None: the connection itself failed, so nobody sent a code
    return code is None or (code != "no server" and str(code).startswith(_AWAY))
