"""A GPU worker of a search: it measures the peers first, then one candidate at a time, then the final. Of several only
the first one measures peers and holds finals."""

from __future__ import annotations

from collections.abc import Callable

from evoattn.evaluation.tasks import DeviceTask
from evoattn.evaluation.workers import BaseWorker, Outcome
from evoattn.search.errors import SearchError
from evoattn.search.finals import Final, FinalFailed
from evoattn.search.progress import Progress
from evoattn.timing.finalists import FinalResult
from evoattn.timing.protocol import SCREEN

PEERS_FACTOR = 3
"""The first measurement of the peers may take this many times as long as one candidate."""


class Device:
    """A worker that times on one board; `seconds` is what one candidate may take. Adds the time of its tasks to
    `progress`."""

    def __init__(
        self, worker: BaseWorker, progress: Progress, seconds: float, board: str = "", first: bool = True
    ) -> None:
        self.worker, self.board, self._progress, self._seconds = worker, board, progress, seconds
        self._peers = Final({}, SCREEN)
        self._measures_peers = first

    @property
    def up(self) -> bool:
        """Whether a candidate can be timed now: the peers are measured, and no task is at hand."""
        return not self.owes_peers and self.worker.idle

    @property
    def owes_peers(self) -> bool:
        """Whether it measures the peers first, and has not yet."""
        return self._measures_peers and self._peers.result is None

    @property
    def state(self) -> str:
        """For the display."""
        return "starting" if not self.worker.ready else "busy" if self.worker.busy else "waiting"

    def wants_peers(self) -> bool:
        """As `owes_peers`; an idle worker is then given the next try."""
        if self.owes_peers and self.worker.idle:
            self.worker.submit(self._peers, self._peers.task, PEERS_FACTOR * self._seconds)
        return self.owes_peers

    def submit(self, tag: object, task: DeviceTask) -> None:
        """Hand a task to the idle worker."""
        self.worker.submit(tag, task, self._seconds)

    def poll(self) -> Outcome | FinalResult | None:
        """The end of a candidate's task, the peers' first times, or None. Raises `SearchError` if the peers cannot be
        measured."""
        outcome = self.worker.poll()
        if outcome is None:
            return None
        self._progress.device_seconds += outcome.seconds
        if outcome.tag is not self._peers:
            return outcome
        try:
            self._peers.take(outcome)
        except FinalFailed as error:
            raise SearchError(f"The peers could not be measured: {error}") from None
        result: FinalResult | None = self._peers.result
        return result

    def hold(self, final: Final, seconds: float, refresh: Callable[[], None]) -> FinalResult:
        """The result of a final, over as many tries as it takes, each of at most `seconds`. The worker has no task.

        Raises `SearchError` if the final cannot be held.
        """
        while final.result is None:
            outcome = self.worker.ask(final.task, seconds, refresh)
            self._progress.device_seconds += outcome.seconds
            try:
                final.take(outcome)
            except FinalFailed as error:
                raise SearchError(
                    f"The final could not be held: {error} All trials are recorded; `--resume` holds it again."
                ) from None
        return final.result
