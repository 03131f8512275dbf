"""What runs on the nodes of a Ray cluster: compile tasks, and an actor for each GPU. Imports no ray: the driver makes
tasks and actors of it."""

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
"""Of this process, by the `Words` that ask for one: Ray gives one process many tasks."""

FindDevices = Callable[[], list[DetectedDevice]]
Words = tuple[MakeHandler, tuple[Any, ...], Facts]
"""What makes a handler, its arguments, and what a machine has to have. They are sent pickled, as tasks are: Ray passes
bytes on as they are, and pickles all else in a slower way."""
Answer = tuple[Ending, Any, str]
"""How a task ended, its result or a sentence, and what it last reported to be about. It comes back pickled."""
READY = pickle.dumps((Ending.RESULT, None, ""), pickle.HIGHEST_PROTOCOL)
"""The answer to a start."""


def node_facts() -> tuple[str, Facts]:
    """The name of this machine and what it has."""
    return platform.node(), facts_here()


def packed(value: Any) -> bytes:
    """For the way to a node or back."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def _made_here(words: bytes) -> tuple[MakeHandler, tuple[Any, ...]]:
    """What makes a handler, and its arguments. Raises `NodeDiffers` on a machine with other facts than are wanted."""
    made_of: Words = pickle.loads(words)
    make_handler, args, wanted = made_of
    require_alike(platform.node(), facts_here(), wanted)
    return make_handler, args


def answer(words: bytes, task: bytes | None) -> bytes:
    """One task by a handler that this process keeps; None as a task only makes the handler.

    Raises `NodeDiffers` on a machine with other facts than are wanted."""
    if words not in _handlers:
        make_handler, args = _made_here(words)
        _handlers[words] = make_handler(*args)
    if task is None:
        return READY
    found: Answer
    try:
        found = Ending.RESULT, _handlers[words](pickle.loads(task)), ""
    except Exception as error:  # a bug of ours costs one task, not the search
        found = Ending.RAISED, sentence_of(error), ""
    return packed(found)


class Board:
    """The actor of one GPU. The process that may be killed is below it, so that a broken context costs no actor."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def describe(self, find: FindDevices) -> DetectedDevice | None:
        """The GPU that Ray gave it, which is the only one that its process sees."""
        return next(iter(find()), None)

    def start(self, words: bytes) -> bytes:
        """Start the worker process, and wait until it can take a task.

        Raises `WorkerFailed`, or `NodeDiffers` on a machine with other facts than are wanted."""
        make_handler, args = _made_here(words)
        if self._worker is not None:
            self._worker.stop()
        self._worker = Worker(make_handler, args)
        self._worker.wait()
        return READY

    def run(self, task: bytes, seconds: float) -> bytes:
        """The end of a task that may take `seconds`."""
        assert self._worker is not None, "start comes first"
        found: Answer
        try:
            outcome = self._worker.ask(pickle.loads(task), seconds)
            found = outcome.ending, outcome.value, outcome.doing
        except WorkerFailed as error:
            found = Ending.DIED, str(error), ""
        return packed(found)
