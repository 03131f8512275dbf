"""What one call asks for: shapes, strides and flags without the data, and why only SDPA can serve it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from evoattn.model.problem import AttentionProblem, ProblemError, canonical_mask

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
CAUSAL_KINDS = ("upper_left", "lower_right")
ALIGNMENT = 16
"""Bytes that every address and stride is a multiple of: vector loads and tensor maps need it."""
PLAIN: Mapping[str, Any] = {}
"""Fields of a call that asks for no variant."""
SEVERAL_DEVICES = "the tensors are on several devices"
NOT_STRIDED = "kernels take strided tensors"
SIZE_NAMES = ("batch", "head", "row")
_FIELDS = tuple(AttentionProblem.__dataclass_fields__)


@dataclass(frozen=True)
class StridedProblem(AttentionProblem):
    """A problem whose tensors lie as a caller's do: `strides_of` holds the strides of q, k, v and o in elements,
    `pages` how many pages the caches have, if there are pages."""

    strides_of: tuple[tuple[int, int, int, int], ...] = ()
    pages: int = 0

    def shape(self, tensor: str) -> tuple[int, int, int, int]:
        shape = super().shape(tensor)
        return (self.pages, *shape[1:]) if self.pages and tensor in "kv" else shape

    def strides(self, tensor: str) -> tuple[int, int, int, int]:
        if tensor == "bias":  # kernels get a copy unless it lies so
            return super().strides(tensor)
        return self.strides_of["qkvo".index(tensor)]

    @property
    def packed(self) -> AttentionProblem:
        """The same problem in a memory layout of its own: what a search or a portfolio speaks of."""
        fields = self.__dict__
        made = object.__new__(AttentionProblem)  # without the checks, which its fields have passed
        made.__dict__.update({name: fields[name] for name in _FIELDS})
        return made


def _plain_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int, int]:
    """`strides` with those of dimensions of one element, which mean nothing, replaced by what the other dimensions
    span.
    """
    span = max([stride * size for stride, size in zip(strides, shape, strict=True) if size > 1 or stride == 1])
    span = -(-span // ALIGNMENT) * ALIGNMENT
    batch, head, row = [strides[dim] if shape[dim] > 1 else span for dim in range(3)]
    return batch, head, row, strides[3]


def _why_wrong_strides(name: str, shape: tuple[int, ...], strides: tuple[int, ...], element: int) -> str | None:
    if strides[3] != 1:
        return f"{name}'s last dimension has stride {strides[3]}, not 1"
    for dim, what in enumerate(SIZE_NAMES):
        if shape[dim] > 1 and (strides[dim] <= 0 or strides[dim] * element % ALIGNMENT):
            return f"{name}'s {what} stride of {strides[dim] * element} bytes is no positive multiple of {ALIGNMENT}"
    return None


def out_like(query: torch.Tensor, value: torch.Tensor, device: str | None = None) -> torch.Tensor:
    """An empty answer to a call: of query's order of dimensions in memory, with the head_dim of value; on query's
    device unless another is given."""
    if query.shape[-1] == value.shape[-1]:
        return torch.empty_like(query, device=device)
    if query.dim() == 4 and query.stride(1) < query.stride(2):
        batch, heads, rows, _ = query.shape
        return query.new_empty((batch, rows, heads, value.shape[3]), device=device).transpose(1, 2)
    return query.new_empty((*query.shape[:-1], value.shape[-1]), device=device)


def may_share(key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether value lies in memory as the first columns of key would; it is them if their addresses are equal too."""
    return value.shape[-1] < key.shape[-1] and value.stride() == key.stride()


def mask_name(is_causal: bool, causal: str) -> str:
    """The `AttentionProblem.mask` of SDPA's flag and of where the diagonal ends."""
    return f"causal_{causal}" if is_causal else "full"


def why_not_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool, paged: bool = False
) -> str | None:
    """One reason, without a full stop, why tensors of these shapes and dtypes are no problem of a kernel, or None."""
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        found = ", ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in (query, key, value)))
        return f"kernels take tensors of one dtype out of float16, bfloat16 and float32, not {found}"
    if not query.dim() == key.dim() == value.dim() == 4:
        return "kernels take tensors of four dimensions, [batch, heads, seqlen, head_dim]"
    of_batch = paged or key.shape[0] == query.shape[0]
    if key.shape[:3] != value.shape[:3] or key.shape[3] != query.shape[3] or not of_batch:
        return "key and value are not of as many batches, heads and rows, with query's batch and head_dim"
    if key.shape[1] != query.shape[1] and not enable_gqa:
        return f"{key.shape[1]} K/V heads for {query.shape[1]} query heads need enable_gqa=True"
    if key.shape[1] and query.shape[1] % key.shape[1]:
        return f"{query.shape[1]} query heads are no multiple of {key.shape[1]} K/V heads"
    return None


def problem_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out_strides: tuple[int, ...],
    fields: Mapping[str, Any],
    *,
    is_causal: bool,
    causal: str,
    enable_gqa: bool,
    lse: bool,
) -> StridedProblem | str:
    """The problem of a call, or one reason, without a full stop, why no kernel takes it. `fields` are those of a
    variant."""
    paged = "page" in fields
    if reason := why_not_shapes(query, key, value, enable_gqa, paged):
        return reason
    if 0 in (*query.shape, *key.shape, *value.shape):
        return "a tensor is empty"
    out_shape = (*query.shape[:3], value.shape[3])
    element, shapes = query.element_size(), (query.shape, key.shape, value.shape, out_shape)
    strides = (query.stride(), key.stride(), value.stride(), out_strides)
    for name, shape, stride in zip(("query", "key", "value", "out"), shapes, strides, strict=True):
        if wrong := _why_wrong_strides(name, tuple(shape), stride, element):
            return wrong
    try:
        return StridedProblem(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            head_dim=query.shape[3],
            value_dim=value.shape[3],
            shared_kv=may_share(key, value) and key.data_ptr() == value.data_ptr() != 0,
            dtype=DTYPES[query.dtype],
            mask=canonical_mask(mask_name(is_causal, causal), fields.get("seqlen_q", query.shape[2])),
            layout="bshd" if query.stride(1) < query.stride(2) else "bhsd",
            lse=lse,
            **{"batch": query.shape[0], "seqlen_q": query.shape[2], "seqlen_k": key.shape[2], **fields},
            pages=key.shape[0] if paged else 0,
            strides_of=tuple([_plain_strides(s, t) for s, t in zip(shapes, strides, strict=True)]),
        )
    except ProblemError as error:
        return str(error).rstrip(".")


def why_not_devices(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: str) -> str | None:
    """One reason, without a full stop, why kernels for devices of that kind cannot read the tensors, or None."""
    if not query.device.type == key.device.type == value.device.type == kind:
        return f"the tensors are on the {query.device.type.upper()}, and kernels run on {kind.upper()} devices"
    return None if query.device == key.device == value.device else SEVERAL_DEVICES


def number(name: str, value: Any) -> float:
    """What torch takes for a float: a number, NumPy's too, or a tensor of one number without dimensions, whose value is
    waited for. Kept as a tensor it would be a part of what calls are known by, whatever it holds later.

    Raises `TypeError` for anything else."""
    if isinstance(value, int | float):
        return float(value)
    plain = getattr(value, "ndim", None) == 0 and hasattr(value, "item")
    if plain and isinstance(found := value.item(), int | float):
        return float(found)
    raise TypeError(f"{name} must be a number, not {type(value).__name__}.")


def cap(softcap: Any) -> float:
    """A soft cap as `number` makes it, 0 for None: models pass the one or the other for none. In compiled code a number
    is left as it is."""
    if softcap is None:
        return 0.0
    return softcap if torch.compiler.is_compiling() else number("softcap", softcap)


def require_flags(**flags: object) -> None:
    """Raise `TypeError` for what is no bool."""
    for name, value in flags.items():
        if value.__class__ is not bool:
            raise TypeError(f"{name} must be bool, not {value!r}.")


def require_causal(causal: object) -> None:
    """Raise `ValueError` for a word that says no corner."""
    if causal not in CAUSAL_KINDS:
        raise ValueError(f"causal must be one of {', '.join(CAUSAL_KINDS)}, not {causal!r}.")


def why_not_scale(scale: float | None) -> str | None:
    """Kernels keep the largest unscaled score of a row, which is the largest scaled one only for a positive scale."""
    if scale is None or (0 < scale < math.inf):
        return None
    return f"kernels take a positive, finite scale, not {scale}"
