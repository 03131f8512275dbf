"""The inside of a worker process: a handler that answers one task after another over a pipe."""

import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from multiprocessing.connection import Connection, wait
from typing import Any

_MAX_SENTENCE = 300


class Ending(Enum):
    """How a task ended."""

    RESULT = "result"
    TIMEOUT = "timeout"
    DIED = "died"
    RAISED = "raised"
    LOST = "lost"
    """The machine went away with the task, through no fault of the task."""


@dataclass(frozen=True)
class Report:
    """Sent while a task goes on."""

    doing: str


class Handler(ABC):
    """What a worker process runs. Made once in the process; `broken` asks for a fresh process after the task at
    hand."""

    broken = False
    connection: Connection | None = None
    """To the parent; set before the first task."""

    def report(self, doing: str) -> None:
        """Tell the parent what the task at hand is about now: if the process dies or hangs, its `Outcome` says so."""
        if self.connection is not None:
            self.connection.send(Report(doing))

    @abstractmethod
    def __call__(self, task: Any) -> Any:
        """The result of one task; an exception costs that task only."""


def serve(
    connection: Connection, make_handler: Callable[..., Handler], args: tuple[Any, ...], environment: dict[str, str]
) -> None:
    """The process: a handler, then tasks until the pipe closes. It has the `environment` of whoever asked for it, not
    that of the server that it was forked from."""
    adopt(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    die_with_parent()  # a search killed -9 leaves no worker behind, not even one that hangs
    try:
        handler = make_handler(*args)
        handler.connection = connection
        connection.send((Ending.RESULT, None, False))
        while True:
            task = connection.recv()
            try:
                message = Ending.RESULT, handler(task)
            except Exception as error:  # a bug of ours costs one task, not the search
                message = Ending.RAISED, sentence_of(error)
            connection.send((*message, handler.broken))
            if handler.broken:
                os._exit(0)  # no destructors: they would touch the lost CUDA context
    except (EOFError, BrokenPipeError, ConnectionResetError):  # who asked for it is gone
        pass
    except Exception as error:  # no handler can be made here: whoever asked for one says why
        with suppress(OSError):  # so too
            connection.send((Ending.RAISED, sentence_of(error), True))


def die_with_parent(whole_group: bool = False) -> None:
    """In a worker: be killed when the process that asked for it ends, however that ends and whatever the worker does;
    with `whole_group` all processes of its group are.

    Its own parent is the server, which does not end before its workers have."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_outlive_nobody, args=(parent.sentinel, whole_group), daemon=True).start()


def _outlive_nobody(sentinel: int, whole_group: bool) -> None:
    wait([sentinel])
    os.kill(0 if whole_group else os.getpid(), signal.SIGKILL)


def adopt(environment: dict[str, str], own: MutableMapping[str, str] = os.environ) -> None:
    """Make this process's `own` environment that one. What is the same in both is there at all times: in a process
    that was begun ahead (`evoattn.evaluation.server.begin_spare`) imports that read it go on meanwhile."""
    for name in own.keys() - environment.keys():
        del own[name]
    for name, value in environment.items():
        if own.get(name) != value:
            own[name] = value


def sentence_of(error: Exception) -> str:
    """One line of an exception: its kind and its words."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_SENTENCE]}"
