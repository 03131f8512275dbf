"""What a search asks of the machines that it runs on."""

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
