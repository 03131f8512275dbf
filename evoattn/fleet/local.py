"""The GPUs and cores of this machine, by processes of its own."""

from __future__ import annotations

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

    def __init__(self, jobs: int, boards: Sequence[str] = ("",)) -> None:
        """`boards`: UUIDs as CUDA_VISIBLE_DEVICES takes them; an empty one is the first GPU that this process sees."""
        self.jobs, self.boards = jobs, tuple(boards)

    def compilers(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> list[BaseWorker]:
        return [*processes(self.jobs, make_handler, args)]

    def devices(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> list[BaseWorker]:
        return [Worker(partial(on_board, board, make_handler), args) for board in self.boards]

    def referee(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> BaseWorker:
        return Worker(partial(on_board, self.boards[0], make_handler), args)

    def stop(self) -> None:
        """Nothing is held beyond the workers."""


def on_board(board: str, make_handler: MakeHandler, *args: Any) -> Handler:
    """In the worker process, before CUDA starts there: the handler, which sees only this GPU."""
    if board:
        os.environ[VISIBLE] = board
    return make_handler(*args)
