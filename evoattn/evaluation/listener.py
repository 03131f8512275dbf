"""Waiting for many workers, again and again."""

from __future__ import annotations

import selectors
import time
from collections.abc import Sequence

from evoattn.evaluation.workers import REFRESH_SECONDS, BaseWorker


class Listener:
    """Says which workers to poll. The operating system is told only of workers that are new or were replaced, so that
    a wait hardly takes longer the more workers there are."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._all_at = 0.0
        self._known: dict[BaseWorker, tuple[object, int]] = {}
        """Each worker's connection, and its file descriptor, which another connection may have once this is closed."""

    def wait(self, workers: Sequence[BaseWorker], seconds: float) -> set[BaseWorker]:
        """Sleep until one of the workers says something, at most `seconds`; those that do. Every `REFRESH_SECONDS` that
        is all of them, as one that says nothing may be over its time."""
        known = self._known
        changed = [worker for worker in workers if known.get(worker, (None,))[0] is not worker.connection]
        if changed or len(known) > len(workers):
            for gone in {*known} - {*workers} | {*changed} & {*known}:
                self._selector.unregister(known.pop(gone)[1])
            for worker in changed:
                descriptor = worker.connection.fileno()
                self._selector.register(descriptor, selectors.EVENT_READ, worker)
                known[worker] = worker.connection, descriptor
        heard = {key.data for key, _ in self._selector.select(seconds)}
        if time.monotonic() < self._all_at:
            return heard
        self._all_at = time.monotonic() + REFRESH_SECONDS
        return {*workers}

    def close(self) -> None:
        """Forget all workers."""
        self._selector.close()
