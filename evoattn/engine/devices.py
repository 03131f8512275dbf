"""The GPU workers of a search: who gets the next candidate, and what a time on one board is worth on another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from evoattn.engine.candidates import Pending
from evoattn.engine.device import Device
from evoattn.engine.finals import Referee
from evoattn.engine.progress import Progress
from evoattn.engine.scale import Reference, Scale
from evoattn.engine.tools import SearchError, Tools
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Gauge
from evoattn.evaluation.workers import BaseWorker, Outcome
from evoattn.fleet.base import Fleet
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Evaluation, Trial, TrialState
from evoattn.timing.protocol import CacheMode, FinalResult

REFEREE_BYTES = 1 << 30
"""Inputs and output of a problem of which a board holds several copies for two workers: each has six or so."""
GAUGE_TRIES = 3
"""Times in a row that a board may fail to time the reference kernel."""


class Devices:
    """A `Device` for each GPU, and a referee for the first one."""

    def __init__(
        self,
        names: Sequence[str],
        workers: Sequence[BaseWorker],
        progress: Progress,
        seconds: float,
        make_referee: Callable[[], BaseWorker | None],
    ) -> None:
        """`seconds`: what one candidate may take on a device. `make_referee` starts a second worker on the first board,
        if it can have one."""
        self.devices = [Device(worker, progress, seconds, name) for name, worker in zip(names, workers, strict=True)]
        self.referee = Referee(make_referee, self.first, seconds)
        self.scale = Scale(names)
        self._progress, self._failed = progress, dict.fromkeys(names, 0)
        progress.boards = len(self.devices)

    @classmethod
    def start(
        cls, fleet: Fleet, tools: Tools, args: tuple[AttentionProblem | None, GpuSpec, CacheMode], progress: Progress
    ) -> Devices:
        """With a worker for each board of the fleet, which `tools` makes with `args`; a referee of its own only where
        they name a problem, which is small enough."""

        def make_referee() -> BaseWorker | None:
            small = args[0] is not None and args[0].bytes <= REFEREE_BYTES
            return fleet.referee(tools.make_device, args) if small else None

        workers = fleet.devices(tools.make_device, args)
        return cls(fleet.boards, workers, progress, tools.device_seconds, make_referee)

    @property
    def first(self) -> Device:
        """On whose board the peers are timed and the final is held."""
        return self.devices[0]

    @property
    def for_final(self) -> Device:
        """Whose worker holds the final where the referee has none: the first that is up, as a machine of several may be
        gone."""
        return next((device for device in self.devices if device.worker.ready), self.first)

    @property
    def compared(self) -> bool:
        """Whether times are scaled: there are several boards, or the study had several before."""
        return len(self.devices) > 1 or self.scale.reference is not None

    @property
    def workers(self) -> list[BaseWorker]:
        """Those of all boards, and the referee's own if it has one."""
        return [*(device.worker for device in self.devices), *self.referee.workers]

    @property
    def busy(self) -> int:
        """Those with a task."""
        return sum(device.worker.busy for device in self.devices)

    @property
    def state(self) -> str:
        """For the display."""
        if len(self.devices) == 1:
            return self.first.state
        return f"{self.busy} of {len(self.devices)} busy"

    def free(self) -> Iterator[Device]:
        """Those that can take a candidate now. One that is to time the reference kernel is given that; the first is
        left to the referee while that wants it.

        As long as no reference is known, one candidate at a time is on any board: the first right one becomes it."""
        self.referee.go_on(self._progress.recorded)
        for device in self.devices:
            if not device.worker.idle or (device is self.first and self.referee.wants_board):
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
        return any(d.worker.busy and not (d is self.first and self.referee.times_peers) for d in self.devices)

    def poll(self, heard: Collection[BaseWorker] | None = None) -> Iterator[tuple[Device, Outcome | FinalResult]]:
        """Ends of candidates' tasks, and the peers' first times. `heard`: the workers to ask, all unless given. Raises
        `SearchError`."""
        asked = self.workers if heard is None else heard
        if any(worker in asked for worker in self.referee.workers) and (peers := self.referee.poll()):
            yield self.first, peers
        for device in self.devices:
            outcome = device.poll() if device.worker in asked else None
            if outcome is None:
                continue
            if self.referee.owns(outcome):
                if peers := self.referee.take(outcome):
                    yield device, peers
            elif isinstance(outcome.tag, Gauge):
                self._gauged(device, outcome)
            else:
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
            reference = Reference(pending.built, trial.number, trial.timing.median_us)
            self.scale.refer_to(reference, device.board)

    def stop(self) -> None:
        """End all workers; tasks under way are lost."""
        for worker in self.workers:
            worker.stop()
