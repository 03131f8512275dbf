"""What a search asks of the machines that it runs on; and this machine's GPUs and cores, by processes of its own."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from evoattn.evaluation.process import Handler
from evoattn.evaluation.workers import BaseWorker, Worker, processes

MakeHandler = Callable[..., Handler]


class Fleet(Protocol):
    """Makes the workers of one search. Who makes them stops them, and then the fleet."""

    @property
    def jobs(self) -> int:
        """Compile workers."""
        ...

    @property
    def boards(self) -> tuple[str, ...]:
        """A name for each GPU, such as its UUID; empty where kernels are never timed."""
        ...

    def compilers(self, make_handler: MakeHandler, args: tuple[Any, ...], beside: bool = False) -> Sequence[BaseWorker]:
        """`jobs` workers, each with a handler of its own. `beside`: they need no torch, and do not wait for it."""
        ...

    def devices(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> Sequence[BaseWorker]:
        """A worker for each of `boards`, in their order. Its handler sees that GPU and no other, as device 0."""
        ...

    def referee(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> BaseWorker | None:
        """A second worker for the first of `boards`: it gets the peers ready beside the search, and holds the final.
        None where a board has one worker only, which then does that too."""
        ...

    def stop(self) -> None:
        """Leave the machines."""
        ...


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
