"""The GPU worker of a search: it measures the peers first, then one candidate at a time, then the final."""

from __future__ import annotations

from collections.abc import Callable

from evoattn.evaluation.workers import Outcome, Worker
from evoattn.search.errors import SearchError
from evoattn.search.finals import Final, FinalFailed
from evoattn.search.progress import Progress
from evoattn.timing.finalists import FinalResult
from evoattn.timing.protocol import SCREEN

PEERS_FACTOR = 3
"""The first measurement of the peers may take this many times as long as one candidate."""


class Device:
    """A `Worker` whose process times; `seconds` is what one candidate may take. Adds the time of its tasks to
    `progress`."""

    def __init__(self, worker: Worker, progress: Progress, seconds: float) -> None:
        self.worker, self._progress, self._seconds = worker, progress, seconds
        self._peers = Final({}, SCREEN)

    @property
    def up(self) -> bool:
        """Whether a candidate can be timed now: the peers are measured, and no task is at hand."""
        return self._peers.result is not None and self.worker.idle

    @property
    def state(self) -> str:
        """For the display."""
        return "starting" if not self.worker.ready else "busy" if self.worker.busy else "waiting"

    def wants_peers(self) -> bool:
        """Whether the peers have no time yet; an idle worker is then given the next try."""
        if self._peers.result is None and self.worker.idle:
            self.worker.submit(self._peers, self._peers.task, PEERS_FACTOR * self._seconds)
        return self._peers.result is None

    def poll(self) -> Outcome | FinalResult | None:
        """The end of a candidate's task, the peers' first times, or None. Raises `SearchError` if the peers cannot be
        measured."""
        outcome = self.worker.poll()
        return self.take(outcome) if outcome else None

    def take(self, outcome: Outcome) -> Outcome | FinalResult | None:
        """As `poll`, of an outcome that has come."""
        self._progress.device_seconds += outcome.seconds
        if outcome.tag is not self._peers:
            return outcome
        try:
            self._peers.take(outcome)
        except FinalFailed as error:
            raise SearchError(f"The peers could not be measured: {error}") from None
        result: FinalResult | None = self._peers.result
        return result

    def hold(
        self, final: Final, seconds: float, refresh: Callable[[], None], earlier: Callable[[Outcome], None]
    ) -> FinalResult:
        """The result of a final, over as many tries as it takes, each of at most `seconds`.

        `earlier` gets the outcome of the candidate still at hand. Raises `SearchError` if the final cannot be held.
        """
        while final.result is None:
            outcome = self.worker.ask(final.task, seconds, refresh, earlier)
            self._progress.device_seconds += outcome.seconds
            try:
                final.take(outcome)
            except FinalFailed as error:
                raise SearchError(
                    f"The final could not be held: {error} All trials are recorded; `--resume` holds it again."
                ) from None
        return final.result
