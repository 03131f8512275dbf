"""What a backend does: run one candidate's launches over named buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from evoattn.model.launch import KernelLaunch

if TYPE_CHECKING:  # the op launches without the latter, and a process that launches nothing needs no torch
    import torch

    from evoattn.model.records import CompiledKernel


class LaunchError(RuntimeError):
    """The launch was refused or failed: the message is the driver's, in one sentence."""


class ContextLost(RuntimeError):
    """The device answers this process no more (illegal address, trap, …), and it must end: the message is the
    driver's."""


def require_order_of_calls(launches: tuple[KernelLaunch, ...]) -> None:
    """Raise `LaunchError` if the first launch may begin before the call before it has ended."""
    if launches[0].overlaps:
        raise LaunchError(
            f"{launches[0].kernel} is the first launch of a call and must not overlap the launch before it."
        )


class DeviceBuffer(Protocol):
    """Memory on a device; a torch tensor is one."""

    def data_ptr(self) -> int:
        """Its address."""
        ...


class Backend(Protocol):
    """Runs kernels. A backend belongs to one process."""

    name: str
    device: torch.device

    def run(
        self, compiled: CompiledKernel, launches: tuple[KernelLaunch, ...], buffers: dict[str, torch.Tensor]
    ) -> tuple[str, ...]:
        """Run `launches` in order, to completion. `buffers` maps each `Buffer.name` to a flat tensor on `device`,
        changed in place.

        Returns the faults that the run itself showed (a race, an access out of bounds), one sentence each; empty where
        there are none or the backend cannot see them. Raises `LaunchError` when a launch is refused or fails."""
        ...


class QueuedBackend(Backend, Protocol):
    """A backend whose launches are enqueued, and waited for together."""

    def prepare(
        self, compiled: CompiledKernel, launches: tuple[KernelLaunch, ...], buffers: Mapping[str, torch.Tensor]
    ) -> Callable[[], None]:
        """A call that enqueues `launches` once; safe to capture in a graph. It keeps `buffers`, whose addresses it has;
        a graph does not, so that the call must outlive the graph. Raises `LaunchError`."""
        ...

    def synchronize(self) -> None:
        """Wait for what is enqueued. Raises `LaunchError` or `ContextLost`."""
        ...
