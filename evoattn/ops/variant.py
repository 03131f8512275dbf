"""What a call asks for beyond plain attention: a window, a cap, sinks, slopes, a bias, keys in use, pages or packed
sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from evoattn.model.problem import BIAS_ROW_STEP, canonical_window

INTEGERS = (torch.int32, torch.int64)
"""Dtypes of lengths and page tables; kernels read int32, and others are copied."""
ALIGNMENT = 16
"""Bytes that addresses are a multiple of where kernels load several elements at once."""

TENSORS = ("sinks", "alibi_slopes", "bias", "seqused_k", "block_table", "cu_seqlens_q", "cu_seqlens_k")
"""The arguments that are tensors, by the names that callers give them."""


LONGEST = 1 << 31
"""No sequence has so many keys."""


def closed(window: Any) -> Any:
    """The window, or None where both of its sides are open, as in flash-attention's default. Sides that are wider than
    any sequence are open, too: int64 does not hold the sum of `sys.maxsize` and a place."""
    if not isinstance(window, tuple | list):
        return window
    sides = tuple(-1 if isinstance(side, int) and side >= LONGEST else side for side in window)
    return None if sides == (-1, -1) else sides


@dataclass(frozen=True)
class Variant:
    """The arguments of `evoattn.attention` by which a call is more than plain attention, as they were given."""

    window: tuple[int, int] | None = None
    """Keys that a query sees before and behind the diagonal; -1 leaves a side open."""
    softcap: float = 0.0
    """0 for none."""
    sinks: Tensor | None = None
    """`[heads]`."""
    slopes: Tensor | None = None
    """`[heads]`."""
    bias: Tensor | None = None
    """Broadcastable to `[batch, heads, seqlen_q, seqlen_k]`."""
    seqused: Tensor | None = None
    """`[batch]` int32: keys in use."""
    table: Tensor | None = None
    """`[batch, pages]` int32: key and value are caches of pages."""
    finite: bool = False
    """Whether what lies behind the last key in use is finite, so that torch need not clear it."""
    starts: tuple[Tensor, Tensor] | None = None
    """`[sequences + 1]` int32 each, of queries and of keys: batch 1 is packed sequences, which begin and end there."""
    longest: tuple[int, int] = (0, 0)
    """The most queries and keys of a packed sequence."""

    def require_tensors(self) -> None:
        """Raise `TypeError` for a list, an array or another thing where a tensor belongs."""
        starts = self.starts or (None, None)
        given = (self.sinks, self.slopes, self.bias, self.seqused, self.table, *starts)
        for name, thing in zip(TENSORS, given, strict=True):
            if thing is not None and not isinstance(thing, Tensor):
                raise TypeError(f"{name} must be a tensor, not {type(thing).__name__}.")

    def require(self, query: Tensor, key: Tensor) -> None:
        """Raise `ValueError` where the arguments do not fit the tensors or each other, `TypeError` for one that is not
        a tensor."""
        self.require_tensors()
        if not query.dim() == key.dim() == 4:
            raise ValueError(
                f"query and key must have four dimensions beside what SDPA lacks, not {query.dim()} and {key.dim()}."
            )
        batch, heads, seqlen_q = query.shape[:3]
        if self.window is not None and (
            not isinstance(self.window, Sequence)
            or len(self.window) != 2
            or any(not isinstance(side, int) or isinstance(side, bool) or side < -1 for side in self.window)
        ):
            raise ValueError(f"window must be (past, ahead), keys beside the diagonal or -1, not {self.window!r}.")
        if not 0 <= self.softcap < math.inf:
            raise ValueError(f"softcap must be positive, or 0 for none, not {self.softcap!r}.")
        for name, tensor in (("sinks", self.sinks), ("alibi_slopes", self.slopes)):
            if tensor is not None and tuple(tensor.shape) != (heads,):
                raise ValueError(f"{name} must have one value for each of the {heads} heads, not {list(tensor.shape)}.")
        for name, tensor, dimensions in (("seqused_k", self.seqused, 1), ("block_table", self.table, 2)):
            if tensor is None:
                continue
            if tensor.dtype not in INTEGERS or tensor.dim() != dimensions or tensor.shape[0] != batch:
                found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
                raise ValueError(f"{name} must be int32 [{batch}{', pages' * (dimensions - 1)}], not {found}.")
        if self.table is not None and self.seqused is None:
            raise ValueError("block_table needs seqused_k, the number of keys in each sequence.")
        if self.starts is not None:
            _require_packed(self.starts, self.longest, (query.shape[2], key.shape[2]))
        if self.bias is None:
            return
        if self.slopes is not None:
            raise ValueError("alibi_slopes and bias exclude each other; add the slopes to the bias.")
        whole = (batch, heads, seqlen_q, key.shape[2])
        shape = (1,) * (4 - self.bias.dim()) + tuple(self.bias.shape)
        if len(shape) != 4 or any(have not in (1, want) for have, want in zip(shape, whole, strict=True)):
            raise ValueError(f"bias must be broadcastable to {list(whole)}, not {list(self.bias.shape)}.")
        if self.bias.dtype not in (query.dtype, torch.float32):
            raise ValueError(f"bias must be float32 or of query's dtype {query.dtype}, not {self.bias.dtype}.")

    def form(self, query: Tensor, key: Tensor) -> tuple[object, ...]:
        """All but the numbers in tensors: what `require` and `fields` go by, beside query and key. Raises `ValueError`
        for a window that is none."""
        window = self.window
        if window is not None and window.__class__ is not tuple:
            self.require(query, key)
            window = window[0], window[1]
        given = self.sinks, self.slopes, self.bias, self.seqused, self.table, *(self.starts or ())
        tensors = (None if t is None else (t.shape, t.dtype) for t in given)
        return window, self.softcap, self.longest, *tensors

    def seqlen_k(self, key: Tensor) -> int:
        """Keys that a sequence has room for."""
        return key.shape[2] if self.table is None else self.table.shape[1] * key.shape[2]

    def on_all(self, change: Callable[[Tensor], Tensor]) -> Variant:
        """The same with every tensor changed."""

        def changed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return replace(
            self,
            sinks=changed(self.sinks),
            slopes=changed(self.slopes),
            bias=changed(self.bias),
            seqused=changed(self.seqused),
            table=changed(self.table),
            starts=None if self.starts is None else (change(self.starts[0]), change(self.starts[1])),
        )

    @property
    def plain(self) -> bool:
        """Whether nothing was asked for."""
        return self.window is None and not self.softcap and not self.tensors

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that were given."""
        given = self.sinks, self.slopes, self.bias, self.seqused, self.table, *(self.starts or ())
        return tuple(t for t in given if t is not None)

    def fields(self, is_causal: bool, query: Tensor, key: Tensor) -> dict[str, Any]:
        """The fields of `AttentionProblem`. An open side of a window is as wide as both sequences, and one that hides
        nothing is left out; how many keys are in use is known to the device alone, so that it is anything from none to
        all, and of packed sequences how long all of them are together.
        """
        fields: dict[str, Any] = {"softcap": float(self.softcap)}
        fields |= {"sink": self.sinks is not None, "alibi": self.slopes is not None}
        seqlen_k = self.seqlen_k(key)
        if self.seqused is not None:
            fields["seqused"] = f"0:{seqlen_k}"
        if self.table is not None:
            fields |= {"page": key.shape[2], "seqlen_k": seqlen_k}
        if self.starts is not None:
            fields |= {"batch": len(self.starts[0]) - 1, "seqlen_q": self.longest[0], "seqlen_k": self.longest[1]}
            fields["varlen"] = f"sum:{query.shape[2]}/sum:{key.shape[2]}"
        if self.window is not None:
            fields["window"] = canonical_window(*self.window, query.shape[2], seqlen_k, is_causal)
        if self.bias is not None:
            over = (1,) * (4 - self.bias.dim()) + tuple(self.bias.shape)
            fields["bias"] = "b" * (over[0] > 1) + "h" * (over[1] > 1) + "s"
        return fields

    def for_kernel(self, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
        """In the order of `kernel.TERMS`: sinks in query's dtype, slopes in float32, the bias with rows of whole 16
        bytes, lengths and table int32 and contiguous: copies where the given ones are not so."""
        sinks = None if self.sinks is None else self.sinks.to(query.dtype).contiguous()
        slopes = None if self.slopes is None else self.slopes.to(torch.float32).contiguous()
        bias = None if self.bias is None else _whole_rows(self.bias, query.shape[2], key.shape[2])
        integers = (self.seqused, self.table, *(self.starts or (None, None)))
        return sinks, slopes, bias, *(None if t is None else t.to(torch.int32).contiguous() for t in integers)


def _require_packed(starts: tuple[Tensor, Tensor], longest: tuple[int, int], totals: tuple[int, int]) -> None:
    """Raise `ValueError` where sequences of these starts and longest lengths cannot be packed in so many rows."""
    for side, tensor, most, total in zip("qk", starts, longest, totals, strict=True):
        if tensor.dtype not in INTEGERS or tensor.dim() != 1 or not len(tensor) == len(starts[0]) > 1:
            found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            raise ValueError(
                f"cu_seqlens_{side} must be int32 [sequences + 1], as many of queries as of keys, not {found}."
            )
        if most < 0 or total > most * (len(tensor) - 1):
            raise ValueError(
                f"max_seqlen_{side}={most} is too short: {len(tensor) - 1} sequences of so many rows are fewer than "
                f"the {total} rows of the tensor, of which those behind the last sequence count too."
            )


def _has_whole_rows(bias: Tensor) -> bool:
    """Whether it lies in memory already as `_whole_rows` would copy it, with room behind the last row."""
    batch, heads, rows, keys = bias.shape
    whole = -(-keys // BIAS_ROW_STEP) * BIAS_ROW_STEP
    places = heads * rows * whole, rows * whole, whole, 1
    if any(size > 1 and stride != place for size, stride, place in zip(bias.shape, bias.stride(), places, strict=True)):
        return False
    end = (bias.storage_offset() + batch * places[0]) * bias.element_size()
    return end <= bias.untyped_storage().nbytes() and bias.data_ptr() % ALIGNMENT == 0


def _whole_rows(bias: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """`[batch or 1, heads or 1, seqlen_q, seqlen_k up to a multiple of 8]`, contiguous, at a multiple of 16 bytes:
    kernels load two elements at once, and after a misaligned load a process can no longer use the device."""
    bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape)).expand(-1, -1, seqlen_q, seqlen_k)
    if _has_whole_rows(bias):
        return bias
    missing = -seqlen_k % BIAS_ROW_STEP
    bias = torch.nn.functional.pad(bias, (0, missing)) if missing else bias.contiguous()
    return bias.clone() if bias.data_ptr() % ALIGNMENT else bias
