"""Killable processes that run one task at a time: the GPU worker and the compile pool are both made of them."""

import math
import os
import selectors
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, SpawnProcess
from pathlib import Path
from typing import Any, Literal

from evoattn.evaluation import server
from evoattn.evaluation.process import Ending, Handler, Report, serve
from evoattn.model.errors import FailedRun
from evoattn.model.records import CompileInfo, Evaluation, TrialState

START_SECONDS = 120.0
"""Within which a process has to have its imports behind it and its handler made."""
START_TRIES = 3
"""Processes that may fail to start in a row."""
REFRESH_SECONDS = 0.1
"""Between two calls of `refresh` while a worker is waited for."""


class WorkerFailed(FailedRun):
    """A worker process cannot be started: its message is one sentence."""


@dataclass(frozen=True)
class Outcome:
    """The end of one task: its tag, how it ended, and the result, or a sentence in `value`."""

    tag: Any
    ending: Ending
    value: Any
    seconds: float
    doing: str = ""
    """What the task last reported to be about (`Handler.report`)."""


def nothing() -> None:
    """What runs between two looks at a worker where the caller has nothing to do."""


class BaseWorker(ABC):
    """Runs one task at a time, wherever that is. `ask` waits for a task's end; `submit` and `poll` do not wait.

    A task over its deadline, or a death, costs that task and a fresh process."""

    connection: Connection
    """Readable when there may be something to `poll`."""

    def __init__(self) -> None:
        self.ready = self.busy = False
        self.failures_to_start, self.start_failure = 0, ""
        self._tag: Any = None
        self._doing, self._started, self._deadline = "", 0.0, math.inf

    @property
    def idle(self) -> bool:
        """Whether it is up and has no task."""
        return self.ready and not self.busy

    @property
    def overdue(self) -> bool:
        """Whether its task, or its start, takes longer than it may."""
        return not self.idle and time.monotonic() > self._deadline

    def check(self) -> None:
        """Raises `WorkerFailed` once the process failed to start `START_TRIES` times in a row."""
        if self.failures_to_start >= START_TRIES:
            raise WorkerFailed(
                f"A worker process failed to start {START_TRIES} times; the last time: {self.start_failure}"
            )

    @abstractmethod
    def submit(self, tag: Any, task: Any, seconds: float) -> None:
        """Hand a task that may take `seconds` to an idle worker. One found dead loses the task and is replaced (see
        `poll`)."""

    @abstractmethod
    def poll(self) -> Outcome | None:
        """The outcome of the task at hand if it has ended, else None; also sees a starting worker become ready."""

    @abstractmethod
    def stop(self) -> None:
        """End it at once, with the task at hand."""

    def ask(
        self,
        task: Any,
        seconds: float,
        refresh: Callable[[], None] = nothing,
        earlier: Callable[[Outcome], None] = lambda outcome: None,
    ) -> Outcome:
        """Wait until the worker is idle, give it the task, and wait for its end.

        The task may take `seconds`, its start not counted. `refresh` is called several times per second meanwhile.
        `earlier` gets the outcome of the task that the worker still had. Raises `WorkerFailed`."""
        while not self.idle:
            if outcome := self._step(refresh):
                earlier(outcome)
            self.check()
        self.submit(None, task, seconds)
        while not (outcome := self._step(refresh)):
            pass
        return outcome

    def wait(self) -> None:
        """Until the worker is idle. Raises `WorkerFailed`."""
        while not self.idle:
            self._step(nothing)
            self.check()

    def _step(self, refresh: Callable[[], None]) -> Outcome | None:
        wait_for_any([self], REFRESH_SECONDS)
        refresh()
        return self.poll()

    def _begin(self, tag: Any) -> None:
        self._tag, self.busy, self._started, self._doing = tag, True, time.monotonic(), ""

    def _end(self, ending: Ending, value: Any) -> Outcome:
        self.busy = False
        return Outcome(self._tag, ending, value, time.monotonic() - self._started, self._doing)


class Worker(BaseWorker):
    """One process of this machine."""

    def __init__(self, make_handler: Callable[..., Handler], args: tuple[Any, ...] = (), beside: bool = False) -> None:
        """`beside`: it needs no torch, and does not wait for it."""
        super().__init__()
        self._make_handler, self._args, self._beside = make_handler, args, beside
        self._spawn()

    def _spawn(self) -> None:
        self.ready, self._waited = False, 0.0
        self._deadline = time.monotonic() + START_SECONDS
        self._process: ForkServerProcess | SpawnProcess
        words = self._make_handler, self._args, dict(os.environ)
        spare = None if self._beside else server.take_spare()
        self._was_spare = spare is not None
        if spare:
            self._process, self.connection = spare
            with suppress(BrokenPipeError, ConnectionResetError):  # `poll` sees the closed pipe and reports the death
                self.connection.send(words)
            return
        self.connection, child = server.CONTEXT.Pipe()
        make = server.spawn if self._beside and not server.forks_soon() else server.fork
        self._process = make(serve, (child, *words))
        child.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid or 0

    def waited(self) -> float:
        """Seconds in which the process wanted a core and had none, as Linux counts them; 0 where nobody does."""
        try:
            return int(Path(f"/proc/{self.pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    @property
    def overdue(self) -> bool:
        """Whether the task takes longer than it may. Time in which the process waited for a core does not count: on a
        busy machine a right kernel would fail."""
        late = time.monotonic() - self._deadline
        return super().overdue and late > self.waited() - self._waited

    def submit(self, tag: Any, task: Any, seconds: float) -> None:
        self._waited = self.waited()
        self._begin(tag)
        self._deadline = self._started + seconds
        with suppress(BrokenPipeError, ConnectionResetError):  # `poll` sees the closed pipe and reports the death
            self.connection.send(task)

    def poll(self) -> Outcome | None:
        try:
            while self.connection.poll():
                message = self.connection.recv()
                if isinstance(message, Report):
                    self._doing = message.doing
                    continue
                ending, value, broken = message
                if broken:
                    return self._lost(ending, value)
                if self.ready:
                    return self._end(ending, value)
                self.ready, self.failures_to_start = True, 0
                if self._was_spare:
                    server.begin_spare()  # for who comes after it: no two import torch at once, as that takes longer
                return None
        except (EOFError, ConnectionResetError, OSError):
            self._process.join(1)
            code = self._process.exitcode
            how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
            return self._lost(Ending.DIED, f"The worker process ended with {how}.")
        if self.overdue:
            limit = self._deadline - self._started if self.busy else START_SECONDS
            return self._lost(Ending.TIMEOUT, f"It ran past its limit of {limit:.0f} s and was ended.")
        return None

    def _lost(self, ending: Ending, value: Any) -> Outcome | None:
        """Replace the process; the outcome of its task, or None if it had none."""
        had_task = self.busy
        if not self.ready:
            self.failures_to_start += 1
            self.start_failure = value
        self.stop()
        self._spawn()
        return self._end(ending, value) if had_task else None

    def stop(self) -> None:
        """Kill the process and close its pipe."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def check_all(workers: Iterable[BaseWorker]) -> None:
    """Raises `WorkerFailed` if one of them failed to start too often."""
    for worker in workers:
        worker.check()


def wait_for_any(workers: Sequence[BaseWorker], seconds: float) -> set[BaseWorker]:
    """Sleep until one of the workers says something, at most `seconds`; those that do."""
    by_connection = {worker.connection: worker for worker in workers}
    return {by_connection[c] for c in wait(by_connection, timeout=seconds) if isinstance(c, Connection)}


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


def failed(outcome: Outcome, where: Literal["compile", "device"], info: CompileInfo | None = None) -> Evaluation:
    """The evaluation of a candidate whose task did not return: `outcome.ending` is not `Ending.RESULT`."""
    sentence, state = str(outcome.value), TrialState.LAUNCH_ERROR if where == "device" else TrialState.COMPILE_ERROR
    if outcome.ending in (Ending.TIMEOUT, Ending.DIED, Ending.LOST):
        state = TrialState.TIMEOUT if outcome.ending is Ending.TIMEOUT else TrialState.WORKER_DIED
        sentence = f"On the {where} worker: {sentence}"
    return Evaluation(state, sentence, info, seconds=outcome.seconds)
