"""Python's collector of cyclic garbage, kept from running where an answer is waited for."""

import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Iterator

from evoattn.model import forks


class _Pausing:
    """The blocks that keep the collector waiting, by thread."""

    def __init__(self) -> None:
        self._lock = forks.Lock()
        self._blocks: Counter[int] = Counter()
        forks.tell(self)

    def begin(self) -> bool:
        """Whether a block began: not where the collector is off and none of them is why."""
        with self._lock:
            if not self._blocks and not gc.isenabled():
                return False
            gc.disable()
            self._blocks[threading.get_ident()] += 1
            return True

    def end(self) -> None:
        with self._lock:
            self._blocks[threading.get_ident()] -= 1
            self._blocks += Counter()  # without zeros
            if not self._blocks:
                gc.enable()

    def after_fork(self) -> None:
        """Of the threads a child has the one that forked alone: the blocks of others would never end there."""
        thread = threading.get_ident()
        others = any(one != thread for one in self._blocks)
        self._blocks = Counter({one: count for one, count in self._blocks.items() if one == thread})
        if others and not self._blocks:
            gc.enable()


_pausing = _Pausing()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """The collector waits until the end of the last such block, in all threads. For blocks of some milliseconds that
    make many objects: enough of them bring about a collection of everything, which takes 65 to 110 ms beside PyTorch,
    and finds nothing where reference counts free them."""
    begun = _pausing.begin()
    try:
        yield
    finally:
        if begun:
            _pausing.end()
