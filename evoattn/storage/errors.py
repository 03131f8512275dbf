"""What can go wrong with a database, in sentences that say what to do."""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import DBAPIError

from evoattn.model.errors import FailedRun, WrongUse


class StorageError(FailedRun):
    """The database cannot serve the call: its message is one sentence that says what to do."""


class UnknownRecord(StorageError, WrongUse, LookupError):
    """A study or trial that the database does not have."""


_SENTENCES = (
    (
        "is locked",
        "The database {place} is locked by another program; wait until that is done, or choose another one with --db.",
    ),
    (
        "readonly database",
        "The database {place} is read-only; make the file and its folder writable, or choose another one with --db.",
    ),
    ("disk is full", "The disk that holds the database {place} is full; free some space and go on with --resume."),
    (
        "disk i/o error",
        "The disk that holds the database {place} fails to read or write; see to it, then go on with --resume.",
    ),
    ("malformed", "The database {place} is damaged; use a copy of it, or start a new one with --db."),
    ("not a database", "{place} is not a SQLite database; choose another file with --db."),
    (
        "unable to open",
        "The database {place} cannot be opened; see that its folder is there and that you may read and write in it.",
    ),
    (
        "no such",
        "The database {place} does not have the tables of this version of evoattn; choose another one with --db.",
    ),
)
"""Texts of SQLite's result codes (sqlite.org/rescode.html), in lower case, and what they mean to a user."""


def explain(error: DBAPIError | sqlite3.Error, place: str) -> StorageError:
    """The driver's error as a sentence about the database at `place`."""
    text = str(error.orig if isinstance(error, DBAPIError) else error)
    for part, sentence in _SENTENCES:
        if part in text.lower():
            return StorageError(sentence.format(place=place))
    return StorageError(f"The database {place} refused the call: {' '.join(text.split())}.")
