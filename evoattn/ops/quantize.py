"""Numbers of 8 bits and their scales, of tensors of 16 or 32: by one kernel on a GPU, else by PyTorch's expressions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from evoattn.backends.base import LaunchError
from evoattn.model.dtype import DTYPES
from evoattn.model.problem import ProblemError
from evoattn.model.quantize import QUANTIZE_OPERATIONS
from evoattn.ops.arguments import is_ordinary
from evoattn.ops.call import StridedProblem, plain_strides, why_wrong_strides
from evoattn.ops.choice import Choice, Refusal
from evoattn.ops.given import EIGHT_BITS
from evoattn.ops.kernel import ZEROED, LaunchArguments, LoadedKernel, Platform
from evoattn.ops.plan import ADDRESS_BITS, COLD, Scratch, launch_again
from evoattn.ops.runtime import Runtime, current

WIDE = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""What kernels read."""
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Whose inverse is a number, too."""
Granularity = Literal["tensor", "head", "token"]
PLACES = {"x": (0, 0), "numbers": (1, 0), "scale": (2, 0), "mean": (3, 0)}
"""Of the tensors among the addresses of a launch; scratch memory comes behind them."""


@dataclass(frozen=True)
class Numbers:
    """`numbers` stand for themselves times `scale`, and where keys were taken less their mean, plus `mean`.

    Scales are float32: of a tensor `[1, 1]`, of each K/V head of each batch `[batch, kv_heads]`, of each row `[batch,
    heads, rows]`. The mean is `[batch, heads, 1, head_dim]`, float32.
    """

    numbers: Tensor
    scale: Tensor
    mean: Tensor | None = None


@dataclass(frozen=True)
class Wanted:
    """What is made of a tensor `[batch, heads, rows, head_dim]`: of which dtype, what shares a scale, how many K/V
    heads there are, and whether the mean of a head's rows is taken from them."""

    dtype: torch.dtype
    granularity: Granularity
    kv_heads: int
    smooth: bool = False

    def problem(self, tensor: Tensor, numbers: Tensor) -> StridedProblem | str:
        """What a kernel is asked for, or one reason, without a full stop, why none is."""
        shape, words = tuple(tensor.shape), ("x", tuple(tensor.shape), tensor.stride(), tensor.element_size())
        if wrong := why_wrong_strides(*words):
            return wrong
        given, made = (plain_strides(shape, one.stride()) for one in (tensor, numbers))
        batch, heads, rows, dim = shape
        try:
            return StridedProblem(
                batch, heads, self.kv_heads, rows, rows, dim, WIDE[tensor.dtype],
                kv=EIGHT_BITS[self.dtype], scales="" if self.granularity == "tensor" else self.granularity,
                op=QUANTIZE_OPERATIONS[self.smooth], strides_of=(given, given, given, made),
            )  # fmt: skip
        except ProblemError as error:
            return str(error).rstrip(".")


def quantize(tensor: Tensor, wanted: Wanted) -> Numbers:
    """The numbers of a tensor, in its order of memory, and their scales.

    A scale is the largest magnitude of what shares it over the largest number of the dtype, 1 where all are 0, and
    2^-126 at least. A number is value · (1 / scale), rounded to the nearest, to the last bit the same by a kernel and
    by PyTorch, but for what the order of a mean's sum makes. NaN and infinities are NaN (0 in int8), and count for no
    scale and no mean.
    """
    return _by_kernel(tensor, wanted, current.runtime()) or by_torch(tensor, wanted)


def quantize_kv(
    key: Tensor,
    value: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    granularity: Granularity = "tensor",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(key, value, k_scale, v_scale): numbers of 8 bits in the order of memory of the tensors that they stand for, and
    the scales that `evoattn.attention` takes beside them.

    Shapes: key and value `[batch, kv_heads, seqlen_k, head_dim]`, of float16, bfloat16 or float32. A scale is the
    largest magnitude over the largest number of `dtype` (448 of float8_e4m3fn, 57344 of float8_e5m2, 127 of int8), 1
    where all are 0: of each tensor `[1]`, of each head of each batch `[batch, kv_heads]`, of each row of each head
    `[batch, kv_heads, seqlen_k]`, float32. Numbers are rounded to the nearest; NaN and infinities are NaN (0 in int8),
    and count for no scale. One kernel makes 8 bits of a tensor of 16 on a GPU. Raises `ValueError` for another dtype or
    granularity, and for tensors of other dimensions.
    """
    if dtype not in EIGHT_BITS:
        known = ", ".join(str(one).removeprefix("torch.") for one in EIGHT_BITS)
        raise ValueError(f"dtype must be one of {known}, not {dtype}.")
    if granularity not in ("tensor", "head", "token"):
        raise ValueError(f"granularity must be 'tensor', 'head' or 'token', not {granularity!r}.")
    if key.dim() != 4 or value.dim() != 4:
        raise ValueError(f"key and value must have four dimensions, not {key.dim()} and {value.dim()}.")
    made = [quantize(tensor, Wanted(dtype, granularity, tensor.shape[1])) for tensor in (key, value)]
    k_scale, v_scale = (one.scale.flatten() if granularity == "tensor" else one.scale for one in made)
    return made[0].numbers, made[1].numbers, k_scale, v_scale


def by_torch(tensor: Tensor, wanted: Wanted) -> Numbers:
    """`quantize` by PyTorch's expressions."""
    largest, wide = DTYPES[EIGHT_BITS[wanted.dtype]].largest, tensor.float()
    finite = wide.isfinite()
    sizes, mean = wide.where(finite, 0), None
    if wanted.smooth:
        mean = sizes.mean(2, keepdim=True)
        wide = wide - mean
        sizes = sizes - mean
    over = {"tensor": (0, 1, 2, 3), "head": (2, 3), "token": (3,)}[wanted.granularity]
    most = sizes.abs().amax(over, keepdim=True)
    group = tensor.shape[1] // wanted.kv_heads
    shared = wanted.granularity == "head" and group > 1
    if shared:
        most = most.unflatten(1, (wanted.kv_heads, group)).amax(2)
    scale = torch.where(most > 0, (most / torch.full_like(most, largest)).clamp(min=LEAST_SCALE), 1.0)
    spread = scale.repeat_interleave(group, 1) if shared else scale
    numbers = (wide * spread.reciprocal()).where(finite, torch.nan).clamp(-largest, largest)
    if not wanted.dtype.is_floating_point:
        numbers = numbers.round().nan_to_num(0.0)
    kept = scale.flatten()[None] if wanted.granularity == "tensor" else scale.squeeze(over)
    return Numbers(numbers.to(wanted.dtype), kept, mean)


def _by_kernel(tensor: Tensor, wanted: Wanted, runtime: Runtime) -> Numbers | None:
    """None where no kernel serves the tensor."""
    if (
        runtime.platform is None
        or tensor.device.type != runtime.device_type
        or tensor.dtype not in WIDE
        or torch.compiler.is_compiling()
        or not is_ordinary(tensor, tensor, tensor)
        or (torch.is_grad_enabled() and tensor.requires_grad)
        or not tensor.numel()
    ):
        return None
    known = ("quantize", wanted, tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
    plans = runtime.helper_plans
    plan = plans.get(known)
    if plan is None:
        plan = _decided(tensor, wanted, runtime)
        if not (isinstance(plan, Refusal) and plan.reason is COLD):
            runtime.keep(plans, known, plan)
    if not isinstance(plan, QuantizePlan):
        return None
    try:
        with runtime.platform.guard(plan.index):
            return plan.run(tensor)
    except LaunchError as error:
        runtime.fail(plan.kernel, str(error).rstrip("."))
        return None


def _decided(tensor: Tensor, wanted: Wanted, runtime: Runtime) -> QuantizePlan | Refusal:
    """The plan of a new kind of call, or why there is none."""
    platform, index = runtime.platform, tensor.get_device()
    assert platform is not None and runtime.loader is not None
    problem = wanted.problem(tensor, torch.empty_like(tensor, dtype=wanted.dtype, device="meta"))
    gpu = platform.spec(index)
    if isinstance(problem, str) or gpu is None:
        return Refusal(problem if isinstance(problem, str) else "evoattn does not know this GPU")
    choice = runtime.choose(problem, gpu, index=index, promised=True)  # PyTorch has no such kernel to race
    if isinstance(choice, Refusal):
        return choice
    ready = runtime.loader.ready(choice, index, choice.launches(None), PLACES)
    return ready if isinstance(ready, Refusal) else QuantizePlan(choice, wanted, *ready, platform)


class QuantizePlan:
    """The launches of tensors of one shape, ready to be run again."""

    def __init__(
        self,
        choice: Choice,
        wanted: Wanted,
        kernel: LoadedKernel,
        launches: tuple[LaunchArguments, ...],
        memory: tuple[int, int, Scratch],
        platform: Platform,
    ) -> None:
        """`memory`: the bytes of scratch memory, none of them zeroed, and who has it."""
        self.kernel, self.index, self.words = kernel, kernel.index, choice.words
        self._dtype, self._launches, self._platform = wanted.dtype, launches, platform
        self._bytes, _, self._scratch = memory
        self._shapes = [spec.shape for spec in choice.problem.outputs[1:]]

    def run(self, tensor: Tensor) -> Numbers | None:
        """The numbers, enqueued on torch's current stream of the device, which is the current one; None where nothing
        was. Raises `LaunchError`."""
        stream, device = self._platform.stream(self.index), tensor.device
        try:
            numbers = torch.empty_like(tensor, dtype=self._dtype)
            made = [torch.empty(shape, dtype=torch.float32, device=device) for shape in self._shapes]
            scratch = self._scratch.get(max(1, self._bytes), False, device, self.index, stream, False)
        except torch.OutOfMemoryError:
            return None
        tensors = [tensor, numbers, *made]
        addresses = [one.data_ptr() for one in tensors]
        if any(one & ADDRESS_BITS for one in addresses) or 0 in addresses:
            return None
        addresses += [0] * (ZEROED + 1 - len(addresses))
        addresses[ZEROED - 1] = scratch.data_ptr()
        with self._scratch.lock:  # those of another thread neither come in between nor change what is bound
            for launch in self._launches:
                launch.bind(tuple(addresses))
                launch.set_stream(stream)
                if status := self._platform.launch(launch.config, launch.function, launch.arguments, None):
                    launch_again(self._platform, self.index, launch, status)
        return Numbers(numbers, *made)
