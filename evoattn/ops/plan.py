"""A call that was decided once: which launches, over which buffers; running it again costs little."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from evoattn.backends.base import LaunchError
from evoattn.backends.loaded import SCRATCH, LaunchArguments, LoadedKernel
from evoattn.backends.platform import NO_CONTEXT, Platform
from evoattn.model.problem import AttentionProblem
from evoattn.ops.arguments import ALIGNMENT, Given
from evoattn.ops.call import Call, out_like
from evoattn.ops.choice import Choice
from evoattn.ops.packed import Packed

ADDRESS_BITS = 15
"""Those that are 0 in a multiple of 16 bytes."""
UNALIGNED = f"an address is no multiple of {ALIGNMENT} bytes"
NO_MEMORY = "a tensor has no memory"
APART = "value does not lie within key, as it did in the call before"
NO_ROOM = "the device has no memory left for what the kernel writes beside its answer"
OF_A_CALL = frozenset((UNALIGNED, NO_MEMORY, APART, NO_ROOM))
"""Why a call was not enqueued that say nothing of the next one."""
FREED = -1
"""In place of the address of a tensor whose memory was freed: 0 says that there is no such tensor."""
FIRST = 4
"""Tensors whose addresses every call has: what the others are, and whether there are any, its plan says."""
MOST_KEPT = 32 << 20
"""Bytes: larger scratch memory goes back to torch's allocator after each call."""


class Scratch:
    """Memory of a call beside its tensors, kept per stream: launches of one stream follow one another.

    A call that a graph records takes memory of its own, the zeros cleared at every replay, since replays may overlap
    work of other streams. The first runs of compiled code may allocate from the pool of a graph that is to come; what
    is kept comes from elsewhere."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.lock = threading.Lock()
        """Held by a call that uses this memory, or has several launches: those of another thread's call do not come in
        between, nor do their writes."""
        self._kept: dict[tuple[int, int, bool], Tensor] = {}

    def get(self, size: int, zeroed: bool, device: torch.device, index: int, stream: int, compiled: bool) -> Tensor:
        """At least `size` bytes that launches on `stream`, the current one, may use; if `zeroed`, of zeros, which they
        leave zero. `compiled`: the call comes from compiled code."""

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


class Plan:
    """The launches of a kernel on one device, and its memory beside the tensors of a call."""

    __slots__ = ("_lock", "_platform", "_scratch", "_scratch_bytes", "_zeroed_bytes", "index", "kernel", "launches")

    def __init__(
        self,
        kernel: LoadedKernel,
        launches: tuple[LaunchArguments, ...],
        memory: tuple[int, int, Scratch],
        platform: Platform,
    ) -> None:
        """`memory`: the bytes of scratch memory and of that which is zeroed, and who has it."""
        self.kernel, self.index, self.launches, self._platform = kernel, kernel.index, launches, platform
        self._scratch_bytes, self._zeroed_bytes, self._scratch = memory
        shares = len(launches) > 1 or self._scratch_bytes or self._zeroed_bytes
        self._lock = self._scratch.lock if shares else threading.Lock()

    def _memory(self, device: torch.device, stream: int, compiled: bool = False) -> tuple[Tensor | None, Tensor | None]:
        """Scratch memory and that which is zeroed, None where there is none: `Scratch.get`. It is named until launches
        are enqueued, so that nobody else gets it. Raises `torch.OutOfMemoryError`."""
        get, index = self._scratch.get, self.index
        return (
            get(self._scratch_bytes, False, device, index, stream, compiled) if self._scratch_bytes else None,
            get(self._zeroed_bytes, True, device, index, stream, compiled) if self._zeroed_bytes else None,
        )


class CallPlan(Plan):
    """The launches of one call. `words` is one sentence about the kernel."""

    __slots__ = (
        "_bound",
        "_given",
        "_has_more",
        "_lse",
        "_sizes",
        "_stream",
        "lse_shape",
        "shared_kv",
        "unlike_query",
        "words",
    )

    def __init__(
        self,
        choice: Choice,
        kernel: LoadedKernel,
        launches: tuple[LaunchArguments, ...],
        memory: tuple[int, int, Scratch],
        given: tuple[Given, ...],
        platform: Platform,
    ) -> None:
        """`memory`: as of `Plan`. `given`: see `Call.given`."""
        super().__init__(kernel, launches, memory, platform)
        problem: AttentionProblem = choice.problem
        self.words = choice.words
        self.lse_shape = problem.lse_shape if problem.lse else None
        self._lse: Tensor | None = None
        self.unlike_query = problem.value_dim > 0 or problem.answer != problem.element
        self.shared_kv = problem.shared_kv
        self._given = given
        self._has_more = launches[0].binding.addresses > FIRST
        self._bound: tuple[int, ...] = ()
        self._stream = -1
        self._sizes: tuple[int, int] | None = (0, 0) if problem.varlen and problem.page else None
        """Sequences and rows of the next launches, where a call may have fewer than there is room for."""

    def run(
        self,
        call: Call | Packed,
        tensors: tuple[Tensor, Tensor, Tensor, Tensor],
        lse: Tensor | None,
        backward: Sequence[Tensor | None] = (),
    ) -> str:
        """Enqueue the call on torch's current stream, of the first four `TENSORS`, the log-sum-exp and, if it is a
        backward pass, `BACKWARD_TENSORS`. The device must be the current one.

        Returns why nothing was enqueued, empty if the call was. Raises `LaunchError` where the driver refuses."""
        index = self.index
        stream = self._platform.stream(index)
        first, second, third, fourth = tensors
        addresses: tuple[int, ...] = first.data_ptr(), second.data_ptr(), third.data_ptr(), fourth.data_ptr()
        if (addresses[0] | addresses[1] | addresses[2] | addresses[3]) & ADDRESS_BITS:
            return UNALIGNED
        if self.shared_kv and addresses[1] != addresses[2]:
            return APART
        if self._has_more:
            scratch = zeros = None
            _made, places = self._read(call.terms) if self._given else ((), ())  # named: nobody gets its memory
            if self._scratch_bytes or self._zeroed_bytes:
                try:
                    scratch, zeros = self._memory(fourth.device, stream, call.compiled)
                except torch.OutOfMemoryError:
                    return NO_ROOM
            addresses = (
                *addresses,
                0 if lse is None else lse.data_ptr(),
                0 if scratch is None else scratch.data_ptr(),
                0 if zeros is None else zeros.data_ptr(),
                *places,
            )
            if backward:
                addresses = (*addresses, *[0 if tensor is None else tensor.data_ptr() for tensor in backward])
        with self._lock:
            if addresses != self._bound or (self._sizes is not None and self._sizes != call.sizes):
                if 0 in addresses[:4] or FREED in addresses:
                    return NO_MEMORY
                self._bound = ()
                if self._sizes is not None:
                    self._sizes = call.sizes
                self.launches[0].binding.bind(addresses, self._sizes)
                self._bound = addresses
            if stream != self._stream:
                for launch in self.launches:
                    launch.set_stream(stream)
                self._stream = stream
            for launch in self.launches:
                if status := self._platform.launch(launch.config, launch.function, launch.arguments, None):
                    launch_again(self._platform, self.index, launch, status)
        return ""

    def empty_lse(self, query: Tensor, compiled: bool) -> Tensor:
        """A log-sum-exp to be written, by the function that has made the answer: behind it another takes three times as
        long. It is like one element, which is of no graph's pool."""
        if self._lse is None:
            if compiled or self._platform.capturing():
                return query.new_empty(self.lse_shape or (), dtype=torch.float32)
            self._lse = query.new_empty((), dtype=torch.float32).expand(self.lse_shape or ())
        return torch.empty_like(self._lse)

    def _read(self, terms: Sequence[Tensor | None]) -> tuple[Sequence[Tensor], Sequence[int]]:
        """What was made of terms so that kernels read them, and the addresses of those that there are, `FREED` where
        the memory is gone."""
        made, places = [], []
        for which, reader, lies_so in self._given:  # in one pass: a call with a bias takes a tenth longer in two
            term = terms[which]
            at = term.data_ptr()  # type: ignore[union-attr]  # calls of a plan have the same terms
            if reader is not None and (not lies_so or at & ADDRESS_BITS):
                term = reader(term)  # type: ignore[arg-type]
                made.append(term)
                at = term.data_ptr()
            places.append(at or FREED)
        return made, places


InTurn = Callable[[Mapping[int, CallPlan]], dict[int, Callable[[], str]]]


def in_turn(call: Call, plans: Mapping[int, CallPlan]) -> dict[int, Callable[[], str]]:
    """What enqueues each of these plans of a call, over one answer that is not the caller's."""
    query, own = call.query, list[Tensor | None]()

    def run(plan: CallPlan) -> str:
        if not own:
            lse = None if plan.lse_shape is None else plan.empty_lse(query, call.compiled)
            given = call.out  # the plan writes by its strides, which may leave gaps
            out = (
                out_like(query, call.value)
                if given is None
                else torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
            )
            own.extend((out, lse))
        assert own[0] is not None
        return plan.run(call, (query, call.key, call.value, own[0]), own[1])

    return {place: partial(run, plan) for place, plan in plans.items()}


class OperationPlan(Plan):
    """The launches of an operation beside attention over tensors of one kind, which are those of its specs."""

    def __init__(
        self,
        choice: Choice,
        kernel: LoadedKernel,
        launches: tuple[LaunchArguments, ...],
        memory: tuple[int, int, Scratch],
        platform: Platform,
    ) -> None:
        """`memory`: as of `Plan`."""
        super().__init__(kernel, launches, memory, platform)
        self._outputs = choice.problem.outputs
        self._names = [spec.name for spec in (*choice.problem.inputs, *self._outputs)]

    def outputs(self, device: torch.device) -> dict[str, Tensor]:
        """Empty ones."""
        return {
            spec.name: torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype), device=device)
            for spec in self._outputs
        }

    def run(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether it was enqueued on torch's current stream of the device, which is the current one. Raises
        `LaunchError`."""
        given = [tensors[name] for name in self._names]
        places = [one.data_ptr() for one in given]
        unaligned = any(at & ADDRESS_BITS for at, one in zip(places, given, strict=True) if one.dtype != torch.int32)
        if unaligned or 0 in places:
            return False
        stream = self._platform.stream(self.index)
        try:
            kept = self._memory(given[0].device, stream)
        except torch.OutOfMemoryError:
            return False
        memory = [0 if one is None else one.data_ptr() for one in kept]
        first = places[:SCRATCH]
        addresses = (*first, *[0] * (SCRATCH - len(first)), *memory, *places[SCRATCH:])
        with self._lock:  # that of another thread neither comes in between nor changes what is bound
            self.launches[0].binding.bind(addresses)
            for launch in self.launches:
                launch.set_stream(stream)
                if status := self._platform.launch(launch.config, launch.function, launch.arguments, None):
                    launch_again(self._platform, self.index, launch, status)
        return True


def launch_again(platform: Platform, index: int, launch: LaunchArguments, status: int) -> None:
    """A thread's first launch may find no context; every other failure raises `LaunchError`."""
    if status in NO_CONTEXT:
        platform.make_context_current(index)
        status = platform.launch(launch.config, launch.function, launch.arguments, None)
    if status:
        raise LaunchError(f"The launch of {launch.kernel} failed: {platform.describe(status)}.")
