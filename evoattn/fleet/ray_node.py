"""What runs on the nodes of a Ray cluster: compile tasks, and an actor for each GPU. Imports no ray: the driver makes
tasks and actors of it."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Callable
from typing import Any

from evoattn.evaluation.process import Ending, Handler, sentence_of
from evoattn.evaluation.workers import Worker, WorkerFailed
from evoattn.fleet.base import MakeHandler
from evoattn.fleet.facts import Facts, facts_here, require_alike
from evoattn.model.gpu import DetectedDevice

_handlers: dict[bytes, Handler] = {}
"""Of this process: Ray gives one process many tasks."""

FindDevices = Callable[[], list[DetectedDevice]]
Answer = tuple[Ending, Any, str]
"""How a task ended, its result or a sentence, and what it last reported to be about."""


def node_facts() -> tuple[str, Facts]:
    """The name of this machine and what it has."""
    return platform.node(), facts_here()


def answer(make_handler: MakeHandler, args: tuple[Any, ...], wanted: Facts, task: Any) -> Answer:
    """One task by a handler that this process keeps; None as a task only makes the handler.

    Raises `NodeDiffers` on a machine with other facts than are wanted.
    """
    require_alike(platform.node(), facts_here(), wanted)
    key = pickle.dumps((make_handler, args))
    if key not in _handlers:
        _handlers[key] = make_handler(*args)
    if task is None:
        return Ending.RESULT, None, ""
    try:
        return Ending.RESULT, _handlers[key](task), ""
    except Exception as error:  # a bug of ours costs one task, not the search
        return Ending.RAISED, sentence_of(error), ""


class Board:
    """The actor of one GPU. The process that may be killed is below it, so that a broken context costs no actor."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def describe(self, find: FindDevices) -> DetectedDevice | None:
        """The GPU that Ray gave it, which is the only one that its process sees."""
        return next(iter(find()), None)

    def start(self, make_handler: MakeHandler, args: tuple[Any, ...], wanted: Facts) -> Answer:
        """Start the worker process, and wait until it can take a task.

        Raises `WorkerFailed`, or `NodeDiffers` on a machine with other facts than are wanted.
        """
        require_alike(platform.node(), facts_here(), wanted)
        if self._worker is not None:
            self._worker.stop()
        self._worker = Worker(make_handler, args)
        self._worker.wait()
        return Ending.RESULT, None, ""

    def run(self, task: Any, seconds: float) -> Answer:
        """The end of a task that may take `seconds`."""
        assert self._worker is not None, "start comes first"
        try:
            outcome = self._worker.ask(task, seconds)
        except WorkerFailed as error:
            return Ending.DIED, str(error), ""
        return outcome.ending, outcome.value, outcome.doing
