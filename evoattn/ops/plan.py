"""A call that was decided once: which launches, over which buffers; running it again costs little."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from evoattn.backends.base import LaunchError
from evoattn.model.problem import AttentionProblem
from evoattn.ops.asked import ALIGNMENT
from evoattn.ops.kernel import LoadedKernel
from evoattn.ops.packed import PackedLaunch
from evoattn.ops.platform import NO_CONTEXT, Platform

ADDRESS_BITS = 15
"""Those that are 0 in a multiple of 16 bytes."""
UNALIGNED = f"an address is no multiple of {ALIGNMENT} bytes"
NO_MEMORY = "a tensor has no memory"
APART = "value does not lie within key, as it did in the call before"
NO_ROOM = "the device has no memory left for what the kernel writes beside its answer"
MOST_KEPT = 32 << 20
"""Bytes: larger scratch memory goes back to torch's allocator after each call."""


class Scratch:
    """Memory of a call beside its tensors, kept per stream: launches of one stream follow one another.

    A call that a graph records takes memory of its own, the zeros cleared at every replay, since replays may overlap
    work of other streams. The first runs of compiled code may allocate from the pool of a graph that is to come; what
    is kept comes from elsewhere.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.lock = threading.Lock()
        """Held by a call that uses this memory, or has several launches: those of another thread's call do not come in
        between, nor do their writes."""
        self._kept: dict[tuple[int, int, bool], Tensor] = {}

    def get(self, size: int, zeroed: bool, device: torch.device, index: int, stream: int, compiled: bool) -> Tensor:
        """At least `size` bytes that launches on `stream`, the current one, may use; if `zeroed`, of zeros, which they
        leave zero. `compiled`: the call comes from compiled code.
        """

        def make() -> Tensor:
            return (torch.zeros if zeroed else torch.empty)(size, dtype=torch.uint8, device=device)

        if size > MOST_KEPT or self._platform.capturing():
            return make()
        kept = self._kept.get((index, stream, zeroed))
        if kept is None or kept.numel() < size:
            kept = self._platform.outside_pools(make, index, stream) if compiled else make()
            self._kept[index, stream, zeroed] = kept
        return kept

    def forget(self) -> None:
        """Take new memory at the next call: a failed launch may have left something."""
        self._kept.clear()


class Refusal:
    """A call that SDPA serves: one sentence why."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class CallPlan:
    """The launches of one call. `words` is one sentence about the kernel."""

    __slots__ = (
        "_bound",
        "_lock",
        "_platform",
        "_scratch",
        "_scratch_bytes",
        "_stream",
        "_zeroed_bytes",
        "index",
        "kernel",
        "launches",
        "lse_shape",
        "shared_kv",
        "value_dim",
        "words",
    )

    def __init__(
        self,
        words: str,
        kernel: LoadedKernel,
        launches: tuple[PackedLaunch, ...],
        problem: AttentionProblem,
        scratch_bytes: int,
        zeroed_bytes: int,
        scratch: Scratch,
        platform: Platform,
    ) -> None:
        self.words, self.kernel, self.index = words, kernel, kernel.index
        self.lse_shape = problem.lse_shape if problem.lse else None
        self.value_dim, self.shared_kv = problem.value_dim, problem.shared_kv
        self.launches, self._platform = launches, platform
        self._scratch_bytes, self._zeroed_bytes, self._scratch = scratch_bytes, zeroed_bytes, scratch
        shares = len(launches) > 1 or scratch_bytes or zeroed_bytes
        self._lock = scratch.lock if shares else threading.Lock()
        self._bound: tuple[int, ...] = ()
        self._stream = -1

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor | None,
        compiled: bool = False,
        terms: tuple[int, ...] = (),
    ) -> str:
        """Enqueue the call on torch's current stream. The device must be the current one. `terms` are the addresses of
        a variant's inputs.

        Returns why nothing was enqueued, empty if the call was. Raises `LaunchError` where the driver refuses.
        """
        index = self.index
        stream = self._platform.stream(index)
        addresses: tuple[int, ...] = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & ADDRESS_BITS:
            return UNALIGNED
        if self.shared_kv and addresses[1] != addresses[2]:
            return APART
        if self._scratch_bytes or self._zeroed_bytes or lse is not None or terms:
            scratch = zeros = None  # named until the launches are enqueued, so that nobody else gets their memory
            try:
                if self._scratch_bytes:
                    scratch = self._scratch.get(self._scratch_bytes, False, query.device, index, stream, compiled)
                if self._zeroed_bytes:
                    zeros = self._scratch.get(self._zeroed_bytes, True, query.device, index, stream, compiled)
            except torch.OutOfMemoryError:
                return NO_ROOM
            addresses = (
                *addresses,
                0 if lse is None else lse.data_ptr(),
                0 if scratch is None else scratch.data_ptr(),
                0 if zeros is None else zeros.data_ptr(),
                *terms,
            )
        with self._lock:
            if addresses != self._bound:
                if 0 in addresses[:4]:
                    return NO_MEMORY
                self._bound = ()
                for launch in self.launches:
                    launch.bind(addresses)
                self._bound = addresses
            if stream != self._stream:
                for launch in self.launches:
                    launch.set_stream(stream)
                self._stream = stream
            for launch in self.launches:
                if status := self._platform.launch(launch.config, launch.function, launch.arguments, None):
                    self._try_again(launch, status)
        return ""

    def _try_again(self, launch: PackedLaunch, status: int) -> None:
        """A thread's first launch may find no context; every other failure raises `LaunchError`."""
        if status in NO_CONTEXT:
            self._platform.make_context_current(self.index)
            status = self._platform.launch(launch.config, launch.function, launch.arguments, None)
        if status:
            raise LaunchError(f"The launch of {launch.kernel} failed: {self._platform.describe(status)}.")
