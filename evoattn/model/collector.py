"""Python's collector of cyclic garbage, kept from running where an answer is waited for."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from evoattn.model import forks


class _Pausing:
    """The threads whose blocks keep the collector waiting."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        forks.tell(self)

    def after_fork(self) -> None:
        """Of the threads a child has the one that forked alone: the blocks of others would never end there."""
        own = self.threads & {threading.get_ident()}
        if self.threads and not own:
            gc.enable()
        self.threads = own


_pausing = _Pausing()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """The collector waits until the block's end, in all threads. For blocks of some milliseconds that make many
    objects: enough of them bring about a collection of everything, which takes 65 to 110 ms beside PyTorch, and finds
    nothing where reference counts free them.
    """
    if not gc.isenabled():
        yield
        return
    thread = threading.get_ident()
    _pausing.threads.add(thread)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        _pausing.threads.discard(thread)
