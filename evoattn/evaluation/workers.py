"""Killable processes that run one task at a time: the GPU worker and the compile pool are both made of them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection, wait
from typing import Any

_CONTEXT = multiprocessing.get_context("spawn")  # a forked child would inherit locks and CUDA state
_PR_SET_PDEATHSIG = 1  # prctl(2), linux/prctl.h


class Ending(Enum):
    """How a task ended."""

    RESULT = "result"
    TIMEOUT = "timeout"
    DIED = "died"
    RAISED = "raised"


@dataclass(frozen=True)
class Outcome:
    """The end of one task: its tag, how it ended, and the result, or a sentence in `value`."""

    tag: Any
    ending: Ending
    value: Any
    seconds: float
    doing: str = ""
    """What the task last reported to be about (`Handler.report`)."""


@dataclass(frozen=True)
class _Report:
    """From the process, while its task goes on."""

    doing: str


class Handler(ABC):
    """What a worker process runs. Made once in the process; `broken` asks for a fresh process after the task at hand."""

    broken = False
    connection: Connection | None = None
    """To the parent; set before the first task."""

    def report(self, doing: str) -> None:
        """Tell the parent what the task at hand is about now: should the process die or hang, its `Outcome` says so."""
        self.connection.send(_Report(doing))

    @abstractmethod
    def __call__(self, task: Any) -> Any:
        """The result of one task; what it raises costs that task only."""


def _main(connection: Connection, make_handler: Callable[..., Handler], args: tuple) -> None:
    """The process: a handler, then tasks until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    ctypes.CDLL(None).prctl(
        _PR_SET_PDEATHSIG, signal.SIGKILL
    )  # a parent killed -9 leaves no worker behind, not even a hung one
    try:
        handler = make_handler(*args)
        handler.connection = connection
        connection.send((Ending.RESULT, None, False))
        while True:
            task = connection.recv()
            try:
                message = Ending.RESULT, handler(task)
            except Exception as error:  # a bug of ours must cost one task, not the search
                message = Ending.RAISED, _sentence(error)
            connection.send((*message, handler.broken))
            if handler.broken:
                os._exit(0)  # no destructors: they would touch the lost CUDA context
    except EOFError:
        pass
    except Exception as error:
        connection.send((Ending.RAISED, _sentence(error), True))


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Worker:
    """One process. `submit` a task, then `poll` until its `Outcome` comes; a task over its deadline, or a death, costs that task and a respawn."""

    def __init__(self, make_handler: Callable[..., Handler], args: tuple = (), start_seconds: float = 120.0) -> None:
        self._make_handler, self._args, self._start_seconds = make_handler, args, start_seconds
        self.ready = False
        self.failures_to_start, self.start_failure = 0, ""
        self._tag: Any = None
        self.busy = False
        self._doing = ""
        self._spawn()

    def _spawn(self) -> None:
        parent, child = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_main, args=(child, self._make_handler, self._args), daemon=True)
        self._process.start()
        child.close()
        self.connection = parent
        self.ready = False
        self._deadline = time.monotonic() + self._start_seconds

    @property
    def idle(self) -> bool:
        return self.ready and not self.busy

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, tag: Any, task: Any, seconds: float) -> None:
        """Hand over a task that may take `seconds`. Only an idle worker takes one; one found dead takes it after its respawn (see `poll`)."""
        self._tag, self.busy, self._started, self._doing = tag, True, time.monotonic(), ""
        self._deadline = self._started + seconds
        try:
            self.connection.send(task)
        except (BrokenPipeError, ConnectionResetError):
            pass  # `poll` sees the closed pipe and reports the death

    def poll(self) -> Outcome | None:
        """The outcome of the task at hand if it has ended, else None; also sees a starting worker become ready."""
        try:
            while self.connection.poll():
                message = self.connection.recv()
                if isinstance(message, _Report):
                    self._doing = message.doing
                    continue
                ending, value, broken = message
                if broken:
                    return self._lost(ending, value)
                if self.ready:
                    return self._end(ending, value)
                self.ready, self.failures_to_start = True, 0
                return None
        except (EOFError, ConnectionResetError, OSError):
            self._process.join(1)
            code = self._process.exitcode
            how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
            return self._lost(Ending.DIED, f"The worker process ended with {how}.")
        if (self.busy or not self.ready) and time.monotonic() > self._deadline:
            limit = self._deadline - self._started if self.busy else self._start_seconds
            return self._lost(Ending.TIMEOUT, f"It ran past its limit of {limit:.0f} s and was ended.")
        return None

    def _end(self, ending: Ending, value: Any) -> Outcome:
        self.busy = False
        return Outcome(self._tag, ending, value, time.monotonic() - self._started, self._doing)

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


class Pool:
    """Several `Worker`s over one queue of tasks."""

    def __init__(self, count: int, make_handler: Callable[..., Handler], args: tuple = ()) -> None:
        self.workers = [Worker(make_handler, args) for _ in range(count)]

    def idle(self) -> list[Worker]:
        return [w for w in self.workers if w.idle]

    def poll(self) -> list[Outcome]:
        """All outcomes that are there now."""
        return [outcome for w in self.workers if (outcome := w.poll())]

    @property
    def in_flight(self) -> int:
        return sum(w.busy for w in self.workers)

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()


def wait_for_any(workers: list[Worker], seconds: float) -> None:
    """Sleep until one of the workers says something, at most `seconds`."""
    wait([w.connection for w in workers], timeout=seconds)
