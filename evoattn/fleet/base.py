"""What a search asks of the machines that it runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from evoattn.evaluation.process import Handler
from evoattn.evaluation.workers import BaseWorker

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

    def compilers(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> Sequence[BaseWorker]:
        """`jobs` workers, each with a handler of its own."""
        ...

    def devices(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> Sequence[BaseWorker]:
        """A worker for each of `boards`, in their order. Its handler sees that GPU and no other, as device 0."""
        ...

    def stop(self) -> None:
        """Leave the machines."""
        ...
