"""The GPU workers of a search: who gets the next candidate, and what a time on one board is worth on another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Gauge
from evoattn.evaluation.workers import BaseWorker, Outcome
from evoattn.model.gpu import GpuSpec
from evoattn.model.records import Evaluation, Trial, TrialState
from evoattn.search.candidates import Pending
from evoattn.search.device import Device
from evoattn.search.errors import SearchError
from evoattn.search.progress import Progress
from evoattn.search.scale import Reference, Scale
from evoattn.timing.finalists import FinalResult

GAUGE_TRIES = 3
"""Times in a row that a board may fail to time the reference kernel."""


class Boards:
    """A `Device` for each GPU. The first one measures the peers."""

    def __init__(
        self, gpu: GpuSpec, names: Sequence[str], workers: Sequence[BaseWorker], progress: Progress, seconds: float
    ) -> None:
        """`seconds`: what one candidate may take on a device."""
        self._gpu = gpu
        self.devices = [
            Device(worker, progress, seconds, name, first=number == 0)
            for number, (name, worker) in enumerate(zip(names, workers, strict=True))
        ]
        self.scale = Scale(names)
        self._progress, self._failed = progress, dict.fromkeys(names, 0)
        progress.boards = len(self.devices)

    @property
    def first(self) -> Device:
        """Who measures the peers."""
        return self.devices[0]

    @property
    def for_final(self) -> Device:
        """Who holds the final: the first that is up, as a machine of several may be gone."""
        return next((device for device in self.devices if device.worker.ready), self.first)

    @property
    def compared(self) -> bool:
        """Whether times are scaled: there are several boards, or the study had several before."""
        return len(self.devices) > 1 or self.scale.reference is not None

    @property
    def workers(self) -> list[BaseWorker]:
        return [device.worker for device in self.devices]

    @property
    def busy(self) -> int:
        """Boards with a task."""
        return sum(device.worker.busy for device in self.devices)

    @property
    def state(self) -> str:
        """For the display."""
        if len(self.devices) == 1:
            return self.first.state
        return f"{self.busy} of {len(self.devices)} busy"

    def free(self) -> Iterator[Device]:
        """Those that can take a candidate now. One that is to time the peers or the reference kernel is given that.

        As long as no reference is known, one candidate at a time is on any board: the first right one becomes it.
        """
        for device in self.devices:
            if device.wants_peers() or not device.worker.idle:
                continue
            if self.scale.due(device.board):
                assert self.scale.reference is not None
                gauge = Gauge(self.scale.reference.kernel)
                device.submit(gauge, gauge)
            elif not self.compared or self.scale.reference or not self._timing:
                yield device

    @property
    def _timing(self) -> bool:
        """Whether a board has a candidate."""
        return any(device.worker.busy and not device.owes_peers for device in self.devices)

    def poll(self) -> Iterator[tuple[Device, Outcome | FinalResult]]:
        """Ends of candidates' tasks, and the peers' first times. Raises `SearchError`."""
        for device in self.devices:
            outcome = device.poll()
            if isinstance(outcome, Outcome) and isinstance(outcome.tag, Gauge):
                self._gauged(device, outcome)
            elif outcome is not None:
                yield device, outcome

    def _gauged(self, device: Device, outcome: Outcome) -> None:
        board = device.board
        if outcome.ending is Ending.RESULT:
            self._failed[board] = 0
            self.scale.took(board, outcome.value.median_us)
            self._progress.speeds = self.scale.speeds
            return
        self._failed[board] += 1
        if self._failed[board] >= GAUGE_TRIES:
            raise SearchError(f"The board {board} cannot time the reference kernel: {outcome.value}")

    def marked(self, device: Device, evaluation: Evaluation) -> Evaluation:
        """A candidate's evaluation on this device, with board and factor in its timings where boards are compared."""
        return self.scale.mark(device.board, evaluation) if self.compared else evaluation

    def learn(self, device: Device, pending: Pending, trial: Trial) -> None:
        """Take the first right kernel for the reference: this device has just timed it."""
        if self.compared and not self.scale.reference and trial.state is TrialState.COMPLETE and trial.timing:
            reference = Reference(pending.built(self._gpu), trial.number, trial.timing.median_us)
            self.scale.refer_to(reference, device.board)

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()
