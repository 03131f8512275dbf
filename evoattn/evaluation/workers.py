"""Killable processes that run one task at a time: the GPU worker and the compile pool are both made of them."""

from __future__ import annotations

import math
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, SpawnProcess
from typing import Any

from evoattn.evaluation import reserve, server
from evoattn.evaluation.process import Ending, Handler, Report, serve
from evoattn.model.errors import FailedRun

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

    A task over its deadline, or a death, costs that task and a fresh process.
    """

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
        `earlier` gets the outcome of the task that the worker still had. Raises `WorkerFailed`.
        """
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

    def __init__(
        self,
        make_handler: Callable[..., Handler],
        args: tuple[Any, ...] = (),
        beside: bool = False,
    ) -> None:
        """`beside`: it needs no torch, and does not wait for it."""
        super().__init__()
        self._make_handler, self._args, self._beside = make_handler, args, beside
        self._spawn()

    def _spawn(self) -> None:
        self.ready = False
        self._deadline = time.monotonic() + START_SECONDS
        self._process: ForkServerProcess | SpawnProcess
        words = self._make_handler, self._args, dict(os.environ)
        spare = None if self._beside else reserve.take()
        self._from_reserve = spare is not None
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

    def submit(self, tag: Any, task: Any, seconds: float) -> None:
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
                if self._from_reserve:
                    reserve.begin()  # for who comes after it: no two import torch at once, as that takes longer
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
