"""Several workers of one kind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from evoattn.evaluation.process import Handler
from evoattn.evaluation.workers import REFRESH_SECONDS, BaseWorker, Outcome, Worker, check_all, nothing, wait_for_any


def processes(
    count: int, make_handler: Callable[..., Handler], args: tuple[Any, ...] = (), beside: bool = False
) -> list[Worker]:
    """`count` workers of this machine that run the same kind of task. `beside`: see `Worker`."""
    return [Worker(make_handler, args, beside=beside) for _ in range(count)]


class Pool:
    """Several workers of one kind."""

    def __init__(self, workers: Sequence[BaseWorker]) -> None:
        self.workers = workers

    def idle(self) -> list[BaseWorker]:
        return [w for w in self.workers if w.idle]

    def poll(self, heard: Collection[BaseWorker] | None = None) -> list[Outcome]:
        """All outcomes that are there now. `heard`: whom alone to ask (`Listener`), as each question is a system
        call."""
        return [outcome for w in self.workers if (heard is None or w in heard) and (outcome := w.poll())]

    def check(self) -> None:
        """Raises `WorkerFailed` as `Worker.check` does."""
        check_all(self.workers)

    def ask(self, tasks: Sequence[Any], seconds: float, refresh: Callable[[], None] = nothing) -> list[Outcome]:
        """The outcomes of all tasks, in their order, once the last has ended. Each may take `seconds`. Raises
        `WorkerFailed`."""
        waiting, done = list(enumerate(tasks))[::-1], dict[int, Outcome]()
        while len(done) < len(tasks):
            for worker in self.idle()[: len(waiting)]:
                number, task = waiting.pop()
                worker.submit(number, task, seconds)
            wait_for_any(self.workers, REFRESH_SECONDS)
            refresh()
            done |= {outcome.tag: outcome for outcome in self.poll()}
            self.check()
        return [done[number] for number in range(len(tasks))]

    @property
    def in_flight(self) -> int:
        return sum(w.busy for w in self.workers)

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()
