"""A kernel on one device: its loaded module, its functions, and whether it may be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from evoattn.families.base import starts_zeroed
from evoattn.model.launch import STATIC_SMEM_LIMIT, KernelLaunch
from evoattn.ops.packed import PackedLaunch, Place
from evoattn.ops.platform import Platform, error_of

if TYPE_CHECKING:  # only a check has one
    from evoattn.model.records import CompiledKernel

TENSORS = ("q", "k", "v", "o", "lse")
TERMS = ("sinks", "slopes", "bias", "seqused", "table", "cu_seqlens_q", "cu_seqlens_k")
"""The inputs of variants (`AttentionProblem.term_shapes`), after the scratch memory."""
SCRATCH, ZEROED = 5, 6
"""Indices, after the tensors, of the two allocations that hold a call's scratch buffers."""
SCRATCH_ALIGNMENT = 256


def tensor_places() -> dict[str, Place]:
    """Where the tensors of a call lie among its addresses."""
    return {name: (i, 0) for i, name in enumerate((*TENSORS, "", "", *TERMS)) if name}


def scratch_places(workspace: dict[str, int]) -> tuple[dict[str, Place], int, int]:
    """Where scratch buffers of these sizes lie, and the bytes of the two allocations: of anything, and of zeros."""
    places: dict[str, Place] = {}
    sizes = {SCRATCH: 0, ZEROED: 0}
    for name, size in workspace.items():
        index = ZEROED if starts_zeroed(name) else SCRATCH
        places[name] = index, sizes[index]
        sizes[index] += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    return places, sizes[SCRATCH], sizes[ZEROED]


class LoadedKernel:
    """One cubin in the context of one device. `failure` is empty, or the reason why it is not launched any more."""

    def __init__(self, cubin: bytes, platform: Platform, index: int) -> None:
        """Raises `LaunchError` where the driver refuses the module."""
        self.index, self.failure = index, ""
        self._platform = platform
        with platform.guard(index):
            platform.make_context_current(index)
            self._module = platform.load(cubin)
        self._functions: dict[str, int] = {}
        self._smem: dict[str, int] = {}

    def holds(self, launches: tuple[KernelLaunch, ...]) -> bool:
        """Whether the functions of `launches` are loaded, so that packing them loads nothing."""
        return all(
            one.kernel in self._functions and one.smem_bytes <= max(STATIC_SMEM_LIMIT, self._smem.get(one.kernel, 0))
            for one in launches
        )

    def _function(self, launch: KernelLaunch) -> int:
        if launch.kernel not in self._functions:
            self._functions[launch.kernel] = self._platform.function(self._module, launch.kernel)
        function = self._functions[launch.kernel]
        if launch.smem_bytes > max(STATIC_SMEM_LIMIT, self._smem.get(launch.kernel, 0)):
            self._platform.allow_shared_memory(function, launch.smem_bytes)
            self._smem[launch.kernel] = launch.smem_bytes
        return function

    def pack(self, launches: tuple[KernelLaunch, ...], places: dict[str, Place]) -> tuple[PackedLaunch, ...]:
        """The launches, ready to be bound. Raises `LaunchError`."""
        with self._platform.guard(self.index):
            self._platform.make_context_current(self.index)
            return tuple(PackedLaunch(one, self._function(one), places, self._platform) for one in launches)


class KernelBackend:
    """The `Backend` that a check runs a loaded kernel with: the launches of a call, then a wait."""

    name = "op"

    def __init__(self, kernel: LoadedKernel, platform: Platform) -> None:
        self.device = platform.device(kernel.index)
        self._kernel, self._platform = kernel, platform

    def run(
        self, compiled: CompiledKernel, launches: tuple[KernelLaunch, ...], buffers: dict[str, torch.Tensor]
    ) -> tuple[str, ...]:
        """See `Backend.run`; `compiled` is what is loaded already. Raises `LaunchError` or `ContextLost`."""
        places = {name: (index, 0) for index, name in enumerate(buffers)}
        addresses = tuple(buffer.data_ptr() for buffer in buffers.values())
        with self._platform.guard(self._kernel.index):
            stream = self._platform.stream(self._kernel.index)
            for packed in self._kernel.pack(launches, places):
                packed.bind(addresses)
                packed.set_stream(stream)
                if status := self._platform.launch(packed.config, packed.function, packed.arguments, None):
                    words = self._platform.describe(status)
                    raise error_of(status, f"The launch of {packed.kernel} failed: {words}.")
            self._platform.synchronize(self._kernel.index)
        return ()
