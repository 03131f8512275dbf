"""The GPUs and cores of this machine, by processes of its own."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from evoattn.evaluation.process import Handler
from evoattn.evaluation.workers import BaseWorker, Worker, processes
from evoattn.fleet.base import MakeHandler

VISIBLE = "CUDA_VISIBLE_DEVICES"


class LocalFleet:
    """One GPU worker for each board, and one pool of compile workers for all of them."""

    def __init__(self, jobs: int, boards: Sequence[str] = ("",), visible: Sequence[str] | None = None) -> None:
        """`boards`: a name for each GPU. `visible`: how CUDA_VISIBLE_DEVICES takes each, its name unless given; an
        empty one is the first GPU that this process sees."""
        self.jobs, self.boards = jobs, tuple(boards)
        self._visible = self.boards if visible is None else tuple(visible)

    def compilers(self, make_handler: MakeHandler, args: tuple[Any, ...], beside: bool = False) -> list[BaseWorker]:
        """`jobs` processes; `make_handler(*args)` makes each one's handler. `beside`: see `Worker`."""
        return [*processes(self.jobs, make_handler, args, beside)]

    def devices(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> list[BaseWorker]:
        """A process for each board, in the order of `boards`; each sees its own GPU alone."""
        return [Worker(partial(on_board, visible, make_handler), args) for visible in self._visible]

    def referee(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> BaseWorker:
        """A second process on the first board, which times the peers and holds the final."""
        return Worker(partial(on_board, self._visible[0], make_handler), args)

    def stop(self) -> None:
        """Nothing is held beyond the workers."""


def visible_as(index: int) -> str:
    """How CUDA_VISIBLE_DEVICES takes the GPU that is number `index` for this process."""
    visible = os.environ.get(VISIBLE, "").strip()
    return visible.split(",")[index].strip() if visible else str(index)


def on_board(visible: str, make_handler: MakeHandler, *args: Any) -> Handler:
    """In the worker process, before CUDA starts there: the handler, which sees only this GPU."""
    if visible:
        os.environ[VISIBLE] = visible
    return make_handler(*args)
