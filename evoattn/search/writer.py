"""Results on their way into the database: a thread writes them, so that the search does not wait for the disk."""

import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from evoattn.model.records import Study, Trial
from evoattn.storage import Storage
from evoattn.storage.trials import NewTrial

SWITCH_SECONDS = 5e-4
"""Seconds for which the thread may hold Python's lock while the search waits for it; by default 5 ms
(`sys.setswitchinterval`)."""


class Writer:
    """Writes one batch of results at a time, each in a transaction of its own.

    Until `stop` it changes how often the threads of the process take turns."""

    def __init__(self, storage: Storage, study: Study) -> None:
        self._storage, self._study = storage, study
        self._thread = ThreadPoolExecutor(1, "results")
        self._batch: Future[list[Trial]] | None = None
        self._switch: float | None = None
        """As it was before the first batch."""

    @property
    def idle(self) -> bool:
        """Whether it has no batch whose trials were not taken."""
        return self._batch is None

    @property
    def done(self) -> bool:
        """Whether its batch is written, or could not be."""
        return self._batch is not None and self._batch.done()

    def begin(self, batch: Sequence[NewTrial]) -> None:
        """Write a batch; it is `idle`."""
        if self._switch is None:
            self._switch = sys.getswitchinterval()
            sys.setswitchinterval(min(self._switch, SWITCH_SECONDS))
        self._batch = self._thread.submit(self._storage.record_all, self._study, batch)

    def take(self) -> list[Trial]:
        """The trials of the batch, in its order; waits for them. Raises `StorageError`."""
        assert self._batch is not None, "there is a batch"
        batch, self._batch = self._batch, None
        return batch.result()

    def stop(self) -> None:
        """Wait for the batch under way; nobody takes it."""
        self._thread.shutdown()
        if self._switch is not None:
            sys.setswitchinterval(self._switch)
