"""Python's collector of cyclic garbage, kept from running where an answer is waited for."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """The collector waits until the block's end, in all threads. For blocks of some milliseconds that make many
    objects: enough of them bring about a collection of everything, which takes 65 to 110 ms beside PyTorch, and finds
    nothing where reference counts free them.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
