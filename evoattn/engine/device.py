"""A GPU worker of a search: it times one candidate at a time."""

from evoattn.engine.progress import Progress
from evoattn.evaluation.tasks import DeviceTask
from evoattn.evaluation.workers import BaseWorker, Outcome


class Device:
    """A worker that times on one board; `seconds` is what one candidate may take. Adds the time of its tasks to
    `progress`."""

    def __init__(self, worker: BaseWorker, progress: Progress, seconds: float, board: str = "") -> None:
        self.worker, self.board, self._progress, self._seconds = worker, board, progress, seconds

    @property
    def state(self) -> str:
        """For the display."""
        return "starting" if not self.worker.ready else "busy" if self.worker.busy else "waiting"

    def submit(self, tag: object, task: DeviceTask) -> None:
        """Hand a task to the idle worker."""
        self.worker.submit(tag, task, self._seconds)

    def poll(self) -> Outcome | None:
        """The end of the task at hand, if it has ended."""
        outcome = self.worker.poll()
        if outcome:
            self._progress.device_seconds += outcome.seconds
        return outcome
