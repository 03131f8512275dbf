"""What can go wrong with a database, in sentences that say what to do."""

import sqlite3

from sqlalchemy.exc import DBAPIError, IntegrityError, StatementError

from evoattn.model.errors import FailedRun, WrongUse


class StorageError(FailedRun):
    """The database cannot serve the call: its message is one sentence that says what to do."""


class UnknownRecord(StorageError, WrongUse, LookupError):
    """A study or trial that the database does not have."""


class AlreadyThere(StorageError):
    """A row with the same unique key."""


class DamagedRecord(StorageError):
    """A row with a value that is missing or not of its kind."""


_AGAIN = "try again (a search goes on with --resume)"
_SENTENCES = (
    (
        "is locked",
        "The database {place} is locked by another program; wait until that is done, or choose another one with --db.",
    ),
    (
        "readonly database",
        "The database {place} is read-only; make the file and its folder writable, or choose another one with --db.",
    ),
    ("disk is full", "The disk that holds the database {place} is full; free some space, then {again}."),
    ("disk i/o error", "The disk that holds the database {place} fails to read or write; see to it, then {again}."),
    ("malformed", "The database {place} is damaged; use a copy of it, or start a new one with --db."),
    ("not a database", "{place} is not a SQLite database; choose another file with --db."),
    (
        "unable to open",
        "The database {place} cannot be opened; see that its folder is there and that you may read and write in it.",
    ),
    (
        "already exists",
        "The tables of the database {place} are not those of the version that it names; use another copy of it, or "
        "choose another one with --db.",
    ),
    (
        "no such",
        "The database {place} does not have the tables of this version of evoattn; choose another one with --db.",
    ),
)
"""Texts of SQLite's result codes (sqlite.org/rescode.html), in lower case, and what they mean to a user."""
_CODES = {
    "08": "The database {place} does not answer; see that its server runs, then {again}.",
    "28": "The database {place} does not let you in; see to the user and the password of its URL.",
    "3D000": "The server has no database {place}; create it with `createdb`, or choose another one with --db.",
    "42501": "You may not do that in the database {place}; ask its owner, or choose another one with --db.",
    "42P01": "The database {place} does not have the tables of this version of evoattn; choose another one with --db.",
    "42P07": "The tables of the database {place} are not those of the version that it names; use another copy of it, "
    "or choose another one with --db.",
    "25006": "The database {place} is read-only; choose another one with --db.",
    "53100": "The disk that holds the database {place} is full; free some space, then {again}.",
    "53300": "The database {place} has too many connections; end some, or raise its max_connections.",
    "57P": "The database {place} is shut down; see that its server runs, then {again}.",
}
"""PostgreSQL's SQLSTATEs, or what they begin with (appendix A of its manual), and what they mean to a user."""


def explain(error: StatementError | sqlite3.Error, place: str) -> StorageError:
    """The driver's error as a sentence about the database at `place`."""
    text = str(error.orig if isinstance(error, StatementError) else error)
    if isinstance(error, StatementError) and not isinstance(error, DBAPIError):  # a value that no driver was given
        return DamagedRecord(f"The database {place} holds a value of another kind ({text}); use another copy of it.")
    code = _sqlstate(error)
    for prefix, sentence in _CODES.items():
        if code.startswith(prefix):
            return StorageError(sentence.format(place=place, again=_AGAIN))
    for part, sentence in () if code else _SENTENCES:
        if part in text.lower():
            return StorageError(sentence.format(place=place, again=_AGAIN))
    if isinstance(error, IntegrityError):
        return AlreadyThere(f"The database {place} refused a row that is there already.")
    return StorageError(f"The database {place} refused the call: {' '.join(text.split())}.")


def _sqlstate(error: StatementError | sqlite3.Error) -> str:
    """PostgreSQL's code; empty for SQLite. A connection that failed has none, but for its words."""
    code = "" if isinstance(error, sqlite3.Error) else getattr(error.orig, "sqlstate", "")
    if code is not None:
        return str(code)
    assert isinstance(error, DBAPIError)
    words = {
        "authentication failed": "28000",
        "no password supplied": "28000",
        "does not exist": "3D000",
        "too many clients": "53300",
        "remaining connection slots": "53300",
    }
    return next((code for part, code in words.items() if part in str(error.orig)), "08000")
