"""A file is written whole or not at all: on a full disk, the one that was there stays."""

import errno
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".evoattn-part"
"""How names of files end that are not in place yet."""
DATABASE = b"SQLite format 3\0"
_OPEN_FILE = re.compile(r"/dev/(stdin|stdout|stderr|fd/.*)|/proc/.*")
"""Paths of files that a process has open, perhaps in the middle: another file in their place would not be seen."""


def replace_file(path: Path, data: bytes, mode: int | None) -> None:
    """Put a file at `path` in one step, with the permissions `mode`, or with those of any new file (None).

    Processes that read `path` see the former file or this one, never a part. Raises `OSError`, and leaves nothing then.
    """
    temporary = path.with_name(f"tmp{secrets.token_hex(8)}{TEMPORARY}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
    try:
        with os.fdopen(handle, "wb") as file:
            if mode is not None:
                with suppress(OSError):  # some file systems have no permissions
                    os.fchmod(handle, mode)  # the process's mask has taken from `mode`
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def write_file(path: Path, text: str) -> None:
    """Write `text` as UTF-8 for a user, in place of what is there, which keeps its permissions; a link stays a link.

    What another file cannot stand for is written in place: a terminal, a pipe or a device, a file of another owner or
    with several names, and one in a folder that takes no new files. A SQLite database is not written over. Raises
    `OSError`, which names `path`."""
    try:
        target = Path(os.path.realpath(path))
        if _is_database(target):
            raise OSError(errno.EEXIST, "A database is not written over; choose another file")
        try:
            about = path.stat()
        except FileNotFoundError:  # nor is what a link leads to
            about = None
        if _must_stay(path, target, about):
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(target, text.encode(), about and stat.S_IMODE(about.st_mode))
    except OSError as error:  # a full disk names no file, and the temporary one is of no interest
        raise OSError(error.errno, error.strerror, str(path)) from None


def _is_database(target: Path) -> bool:
    """Whether the file has what SQLite's begin with; one that cannot be read is left to be written."""
    with suppress(OSError):
        if target.is_file():
            with target.open("rb") as file:
                return file.read(len(DATABASE)) == DATABASE
    return False


def _must_stay(path: Path, target: Path, about: os.stat_result | None) -> bool:
    """Whether a new file cannot take the place of `target`, which `path` leads to; `about` is None if it is not
    there."""
    if about is None:
        return not os.access(target.parent, os.W_OK | os.X_OK)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1 or about.st_uid != os.geteuid():
        return True
    if _OPEN_FILE.fullmatch(os.path.abspath(path)):
        return True
    return not (os.access(target, os.W_OK) and os.access(target.parent, os.W_OK | os.X_OK))
