"""Numbers of 8 bits and their scales, of tensors of 16 or 32: by one kernel on a GPU, else by PyTorch's expressions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from evoattn.model.dtype import DTYPES
from evoattn.model.problem import ProblemError
from evoattn.model.quantize import QUANTIZE_OPERATIONS, TURN
from evoattn.ops.arguments import is_ordinary
from evoattn.ops.call import E4M3, StridedProblem, plain_strides, why_wrong_strides
from evoattn.ops.given import EIGHT_BITS
from evoattn.ops.runtime import Runtime, current

WIDE = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""What kernels read."""
LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Whose inverse is a number, too."""
Granularity = Literal["tensor", "head", "token"]


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
    turned: bool = False
    """Numbers are made as `evoattn.model.turned` has them."""

    def problem(self, tensor: Tensor) -> StridedProblem | str:
        """What a kernel is asked for, or one reason, without a full stop, why none is."""
        numbers = torch.empty_like(tensor, dtype=self.dtype, device="meta")
        shape, words = tuple(tensor.shape), ("x", tuple(tensor.shape), tensor.stride(), tensor.element_size())
        if wrong := why_wrong_strides(*words):
            return wrong
        given, made = (plain_strides(shape, one.stride()) for one in (tensor, numbers))
        batch, heads, rows, dim = shape
        try:
            return StridedProblem(
                batch, heads, self.kv_heads, rows, rows, dim, WIDE[tensor.dtype],
                kv=EIGHT_BITS[self.dtype], scales="" if self.granularity == "tensor" else self.granularity,
                op=QUANTIZE_OPERATIONS[self.smooth], turned=self.turned, strides_of=(given, given, given, made),
            )  # fmt: skip
        except ProblemError as error:
            return str(error).rstrip(".")


def quantize(tensor: Tensor, wanted: Wanted) -> Numbers:
    """The numbers of a tensor, in its order of memory or `turned`, and their scales.

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
    turned: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(key, value, k_scale, v_scale): numbers of 8 bits in the order of memory of the tensors that they stand for, and
    the scales that `evoattn.attention` takes beside them.

    Shapes: key and value `[batch, kv_heads, seqlen_k, head_dim]`, of float16, bfloat16 or float32. A scale is the
    largest magnitude over the largest number of `dtype` (448 of float8_e4m3fn, 57344 of float8_e5m2, 127 of int8), 1
    where all are 0: of each tensor `[1]`, of each head of each batch `[batch, kv_heads]`, of each row of each head
    `[batch, kv_heads, seqlen_k]`, float32. Numbers are rounded to the nearest; NaN and infinities are NaN (0 in int8),
    and count for no scale. One kernel makes 8 bits of a tensor of 16 on a GPU. `turned` gives value its keys along
    rows, as `attention_fp8(…, turned=True)` takes it: `[batch, kv_heads, head_dim, keys]`, the keys of each 16 in the
    order of `evoattn.model.turned`, zeros behind the last. Raises `ValueError` for another dtype or granularity, and
    for tensors of other dimensions.
    """
    if dtype not in EIGHT_BITS:
        known = ", ".join(str(one).removeprefix("torch.") for one in EIGHT_BITS)
        raise ValueError(f"dtype must be one of {known}, not {dtype}.")
    if granularity not in ("tensor", "head", "token"):
        raise ValueError(f"granularity must be 'tensor', 'head' or 'token', not {granularity!r}.")
    if key.dim() != 4 or value.dim() != 4:
        raise ValueError(f"key and value must have four dimensions, not {key.dim()} and {value.dim()}.")
    if turned and granularity == "token":
        raise ValueError("turned goes with granularity 'tensor' or 'head': a product sums over the scales of tokens.")
    wanted = Wanted(dtype, granularity, key.shape[1])
    made = quantize(key, wanted), quantize(value, replace(wanted, kv_heads=value.shape[1], turned=turned))
    k_scale, v_scale = (one.scale.flatten() if granularity == "tensor" else one.scale for one in made)
    return made[0].numbers, made[1].numbers, k_scale, v_scale


def turn(value: Tensor) -> Tensor | None:
    """Numbers of e4m3 `[batch, kv_heads, keys, head_dim]` as `evoattn.model.turned` has them; None where no kernel
    serves them."""
    runtime = current.runtime()
    if not _is_readable(value, runtime) or value.dtype != E4M3:
        return None
    known = (TURN, value.shape, value.stride(), value.get_device())
    plan = runtime.planned(known, value.get_device(), lambda: _turn_problem(value))
    try:
        outputs = None if plan is None else plan.outputs(value.device)
    except torch.OutOfMemoryError:
        return None
    if plan is None or outputs is None or not runtime.performs(plan, {"x": value, **outputs}):
        return None
    return outputs["numbers"]


def _turn_problem(value: Tensor) -> StridedProblem | str:
    shape = tuple(value.shape)
    if wrong := why_wrong_strides("value", shape, value.stride(), 1):
        return wrong
    batch, heads, keys, dim = shape
    try:
        lies = plain_strides(shape, value.stride())
        return StridedProblem(
            batch, heads, heads, keys, keys, dim, "e4m3", op=TURN, turned=True, strides_of=(lies,) * 4
        )
    except ProblemError as error:
        return str(error).rstrip(".")


def _is_readable(tensor: Tensor, runtime: Runtime) -> bool:
    """Whether a kernel may read it, whatever its dtype."""
    return (
        runtime.platform is not None
        and tensor.device.type == runtime.device_type
        and not torch.compiler.is_compiling()
        and is_ordinary(tensor, tensor, tensor)
        and not (torch.is_grad_enabled() and tensor.requires_grad)
        and tensor.numel() > 0
    )


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
    stored = numbers.to(wanted.dtype)
    if wanted.turned:
        from evoattn.correctness.eight_bits import turn  # a kernel has done that where there is one

        stored = turn(stored)
    return Numbers(stored, kept, mean)


def _by_kernel(tensor: Tensor, wanted: Wanted, runtime: Runtime) -> Numbers | None:
    """None where no kernel serves the tensor."""
    if not _is_readable(tensor, runtime) or tensor.dtype not in WIDE:
        return None
    known = ("quantize", wanted, tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
    plan = runtime.planned(known, tensor.get_device(), lambda: wanted.problem(tensor))
    if plan is None:
        return None
    try:
        outputs = plan.outputs(tensor.device)
    except torch.OutOfMemoryError:
        return None
    return Numbers(*outputs.values()) if runtime.performs(plan, {"x": tensor, **outputs}) else None
