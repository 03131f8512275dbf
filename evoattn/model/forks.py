"""What a child of `os.fork` has to put right: a lock that another thread held stays held there for ever."""

import os
import threading
import weakref
from typing import Protocol


class Forked(Protocol):
    """What a child has to put right."""

    def after_fork(self) -> None:
        """Called in the child, before anything else there."""
        ...


_told: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell(what: Forked) -> None:
    """Have its `after_fork` called in every child from now on, for as long as it lives."""
    _told.add(what)


def _tell_all() -> None:
    for what in list(_told):
        what.after_fork()


os.register_at_fork(after_in_child=_tell_all)


class Lock:
    """`with` takes it, more than once in the same thread. In a forked child it is free, unless the thread that forked
    holds it: that one goes on in its block there."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder, self._depth = 0, 0
        tell(self)

    def after_fork(self) -> None:
        self._lock = threading.RLock()
        self._depth = self._depth if self._holder == threading.get_ident() else 0
        for _ in range(self._depth):
            self._lock.acquire()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()
