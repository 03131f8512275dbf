"""The main file of the program that searches: `multiprocessing` has each new process import it, which a search does
without, unless what it sends to its workers is defined there."""

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from evoattn.model.errors import WrongUse

_lock = Lock()
_without = 0


@contextmanager
def without_main_file() -> Iterator[None]:
    """Worker processes that are started meanwhile do not import the program's main file: it needs no guard, may come
    from standard input, and its imports cost them no time. They can be sent nothing that it defines."""
    global _without
    with _lock:
        _without += 1
    try:
        yield
    finally:
        with _lock:
            _without -= 1


@contextmanager
def as_asked() -> Iterator[None]:
    """Around the start of a process: `multiprocessing` does not see the main file if it is to be left out."""
    with _lock:
        main = vars(sys.modules["__main__"])
        names = ("__file__", "__spec__") if _without else ()
        kept: dict[str, Any] = {name: main[name] for name in names if name in main}
        if kept:
            main.pop("__file__", None)
            main["__spec__"] = None
        try:
            yield
        finally:
            main.update(kept)


def require_startable() -> None:
    """Raise `WrongUse` in a process of another library that can start none: `multiprocessing` allows that neither to a
    daemonic one, as those of its `Pool`, nor to one that still imports the main file, and says so only after a study
    has begun."""
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        raise WrongUse(
            "A search was begun by a process that imports the script which started it: put the call under "
            '`if __name__ == "__main__":`.'
        )
    if process.daemon:
        raise WrongUse("A search starts processes, which multiprocessing forbids in a daemonic one, as a Pool's are.")
