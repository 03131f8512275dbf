"""New keys and values written into caches, and a rotary embedding of keys and queries, by one kernel on a GPU."""

from __future__ import annotations

import threading
from typing import Protocol

import torch
from torch import Tensor

from evoattn.backends.base import LaunchError
from evoattn.model.append import HALVES, PAIRS
from evoattn.model.mask import FULL
from evoattn.model.problem import ProblemError
from evoattn.ops.arguments import is_ordinary
from evoattn.ops.call import DTYPES, StridedProblem, plain_strides, why_wrong_strides
from evoattn.ops.choice import Refusal
from evoattn.ops.kernel import LaunchArguments, LoadedKernel, Platform
from evoattn.ops.plan import ADDRESS_BITS, COLD, launch_again
from evoattn.ops.runtime import Runtime, current

Rotary = tuple[Tensor, Tensor, bool]
"""Cosines and sines `[positions, turned columns / 2]`, and whether neighbouring columns are a pair."""
NAMES = ("new_k", "new_v", "k_cache", "v_cache", "q", "o", "cos", "sin", "seqused", "table")
"""The tensors of a launch, in the order of their addresses."""
INTEGERS = 2
"""How many of them, the last ones, are int32."""


class CacheLike(Protocol):
    """Caches `[rows, length, kv_heads, head_dim]`, or pages that `table` `[batch, most pages]` names."""

    @property
    def k(self) -> Tensor: ...
    @property
    def v(self) -> Tensor: ...
    @property
    def used(self) -> Tensor | None:
        """`[batch]`: keys in use."""

    @property
    def table(self) -> Tensor | None: ...


def appended(
    q: Tensor, new: tuple[Tensor, Tensor], cache: CacheLike, rotary: Rotary | None, moves: bool
) -> Tensor | None:
    """The queries, turned if `rotary` is given, after a kernel has written the new keys, turned alike, and values
    behind those in use of a cache; None where none has.

    q `[batch, rows, heads, head_dim]`, new keys and values `[batch, rows, kv_heads, head_dim]`. `moves`: query i has
    the position of new key i, else that of the first.
    """
    runtime = current.runtime()
    given = (q, *new, cache.k, cache.v, *(rotary[:2] if rotary else ()))
    if runtime.platform is None or not _can_be_read(given, cache, runtime):
        return None
    k, v = (tensor.contiguous() for tensor in new)
    cos, sin = (tensor.contiguous() for tensor in rotary[:2]) if rotary else (None, None)
    table = None if cache.table is None else cache.table.contiguous()
    lying = [(one.shape, one.stride()) for one in (q, k, v, cache.k, cache.v)]
    sizes = None if cos is None else cos.shape, None if table is None else table.shape
    known = ("append", *lying, *sizes, rotary and rotary[2], moves, q.dtype, q.get_device())
    plan = runtime.helper_plans.get(known)
    if plan is None:
        problem = _problem(q, (k, v), cache, rotary, moves)
        plan = Refusal(problem) if isinstance(problem, str) else _decided(problem, runtime, q.get_device())
        if not (isinstance(plan, Refusal) and plan.reason is COLD):
            runtime.keep(runtime.helper_plans, known, plan)
    if not isinstance(plan, AppendPlan):
        return None
    turned = torch.empty(q.shape, dtype=q.dtype, device=q.device) if rotary else q
    tensors = (k, v, cache.k, cache.v, q, turned if rotary else None, cos, sin, cache.used, table)
    try:
        with runtime.platform.guard(plan.index):
            return turned if plan.run(tensors) else None
    except LaunchError as error:
        runtime.fail(plan.kernel, str(error).rstrip("."))
        return None


def _can_be_read(given: tuple[Tensor, ...], cache: CacheLike, runtime: Runtime) -> bool:
    """Whether tensors are of dtypes and devices that kernels read. Of wrong shapes PyTorch's expressions complain."""
    q, k, v, k_cache, v_cache = given[:5]
    integers = [one for one in (cache.used, cache.table) if one is not None]
    if torch.compiler.is_compiling() or not (is_ordinary(q, k, v) and is_ordinary(q, k_cache, v_cache)):
        return False
    if any(one.dtype != q.dtype or one.device != q.device or not one.numel() for one in given):
        return False
    if any(one.dtype != torch.int32 or one.device != q.device for one in integers) or cache.used is None:
        return False
    if q.dtype not in DTYPES or q.device.type != runtime.device_type or not cache.used.is_contiguous():
        return False
    if torch.is_grad_enabled() and any(one.requires_grad for one in given):
        return False
    if any(one.dim() != 4 for one in given[:5]) or k.shape[:2] != q.shape[:2] or v.shape[:3] != k.shape[:3]:
        return False
    alike = k_cache.shape[2:] == k.shape[2:] and v_cache.shape[2:] == v.shape[2:] and q.shape[3] == k.shape[3]
    return alike and k_cache.shape[:2] == v_cache.shape[:2] and q.shape[2] % k.shape[2] == 0


def _problem(
    q: Tensor, new: tuple[Tensor, Tensor], cache: CacheLike, rotary: Rotary | None, moves: bool
) -> StridedProblem | str:
    """What a kernel is asked for, or one reason, without a full stop, why none is."""
    (batch, rows, heads, dim), (kv_heads, value_dim) = q.shape, new[1].shape[2:]
    pages, length = cache.k.shape[:2]
    page, sequences = (0, pages) if cache.table is None else (length, cache.table.shape[0])
    room = length if cache.table is None else length * cache.table.shape[1]
    if sequences != batch or cache.used is None or cache.used.shape != (batch,):
        return "caches and lengths are of another batch"
    if rotary and (rotary[0].shape != rotary[1].shape or rotary[0].dim() != 2 or rotary[0].shape[0] < room):
        return "rotary tables have fewer positions than the cache has room for"
    half = rotary[0].shape[1] if rotary else 0
    views = [one.transpose(1, 2) for one in (q, cache.k, cache.v)]
    for name, one in zip(("q", "k_cache", "v_cache"), views, strict=True):
        if wrong := why_wrong_strides(name, tuple(one.shape), one.stride(), one.element_size()):
            return wrong
    strides = [plain_strides(tuple(one.shape), one.stride()) for one in views]
    share = None if not half or 2 * half == dim else 2 * half / dim
    try:
        return StridedProblem(
            batch, heads, kv_heads, rows, room, dim, DTYPES[q.dtype], "causal_lower_right" if moves else FULL, "bshd",
            scale=share, value_dim=value_dim, seqused=f"0:{room}", page=page,
            op=(PAIRS if rotary[2] else HALVES) if rotary else "append",
            strides_of=(*strides, strides[0]), pages=pages if page else 0,
        )  # fmt: skip
    except ProblemError as error:
        return str(error).rstrip(".")


def _decided(problem: StridedProblem, runtime: Runtime, index: int) -> AppendPlan | Refusal:
    """The plan of a new kind of call, or why there is none."""
    platform = runtime.platform
    assert platform is not None and runtime.loader is not None
    if (gpu := platform.spec(index)) is None:
        return Refusal("evoattn does not know this GPU")
    choice = runtime.choose(problem, gpu, index=index, promised=True)  # PyTorch has no such kernel to race
    if isinstance(choice, Refusal):
        return choice
    places = {name: (number, 0) for number, name in enumerate(NAMES)}
    ready = runtime.loader.ready(choice, index, choice.launches(None), places)
    return ready if isinstance(ready, Refusal) else AppendPlan(ready[0], ready[1], platform)


class AppendPlan:
    """The launch of tensors of one kind, ready to be run again."""

    def __init__(self, kernel: LoadedKernel, launches: tuple[LaunchArguments, ...], platform: Platform) -> None:
        self.kernel, self.index = kernel, kernel.index
        self._launches, self._platform, self._lock = launches, platform, threading.Lock()

    def run(self, tensors: tuple[Tensor | None, ...]) -> bool:
        """Whether it was enqueued on torch's current stream of the device, which is the current one. Raises
        `LaunchError`."""
        addresses = tuple(0 if one is None else one.data_ptr() for one in tensors)
        if any(one & ADDRESS_BITS for one in addresses[:-INTEGERS]):
            return False
        stream = self._platform.stream(self.index)
        for launch in self._launches:
            with self._lock:  # that of another thread does not change what is bound
                launch.bind(addresses)
                launch.set_stream(stream)
                if status := self._platform.launch(launch.config, launch.function, launch.arguments, None):
                    launch_again(self._platform, self.index, launch, status)
        return True
