"""K and V of 8 bits in calls: their scales as kernels read them, and what torch makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evoattn.model.dtype import DTYPES, KEY_DTYPES
from evoattn.ops.arguments import ATTENTION, K_SCALE, PAGED, STARTS_K, TABLE, TERMS, V_SCALE, VARLEN, number
from evoattn.ops.call import Call

EIGHT_BITS = {getattr(torch, DTYPES[name].torch): name for name in KEY_DTYPES}
"""Names of the dtypes, as `AttentionProblem.kv` has them."""
FORMS = {
    ATTENTION: "[batch, kv_heads, seqlen_k]",
    VARLEN: "[total_k, kv_heads]",
    PAGED: "[pages, page, kv_heads]",
}
"""Of scales of each key, by the function that takes them."""
Scale = float | Tensor | None


def is_eight_bits(tensor: Any) -> bool:
    """Whether it is a tensor of numbers that scales belong to."""
    return getattr(tensor, "dtype", None) in EIGHT_BITS


def with_scales(call: Call, k_scale: Scale, v_scale: Scale) -> Call:
    """The call with the scales of its keys and values among its terms, `[batch, kv_heads]` or, of each key, `[batch or
    pages, kv_heads, rows]`, float32: views of what was given, 1 where nothing was. The same call where key has 16 or 32
    bits.

    Raises `ValueError` for scales beside such a key, and those that do not fit, `TypeError` for what is none.
    """
    if not is_eight_bits(call.key):
        if k_scale is None and v_scale is None:
            return call
        raise ValueError("k_scale and v_scale belong to keys and values of 8 bits: float8_e4m3fn, float8_e5m2 or int8.")
    if call.key.dim() != 4 or call.value.dim() != 4 or call.key.shape[:3] != call.value.shape[:3]:
        raise ValueError("key and value of 8 bits must have four dimensions, and as many heads and rows.")
    made = [_scale(name, given, call) for name, given in (("k_scale", k_scale), ("v_scale", v_scale))]
    if made[0].dim() != made[1].dim():
        of_each = next(scale for scale in made if scale.dim() == 3).shape
        made = [scale if scale.dim() == 3 else _of_each_key(scale, tuple(of_each), call) for scale in made]
    terms = list(call.terms or (None,) * len(TERMS))
    terms[K_SCALE], terms[V_SCALE] = made
    return replace(call, terms=tuple(terms))


def _form(call: Call) -> str:
    return PAGED if call.paged else VARLEN if call.packed else ATTENTION


def _sequences(call: Call) -> int:
    starts, table = call.term(STARTS_K), call.term(TABLE)
    if starts is not None:
        return len(starts) - 1
    return call.key.shape[0] if table is None else len(table)


def _scale(name: str, given: Scale, call: Call) -> Tensor:
    key, form, sequences = call.key, _form(call), _sequences(call)
    if not isinstance(given, Tensor):
        value = 1.0 if given is None else number(name, given)
        return torch.full((1, 1), value, dtype=torch.float32, device=key.device)
    heads, shape = key.shape[1], tuple(given.shape)
    given = given.float()
    if given.numel() == 1 and given.dim() < 3:
        return given.reshape(1, 1)
    if shape == (heads,):
        return given[None].expand(sequences, heads)
    if len(shape) == 2 and shape[0] in (1, sequences) and shape[1] in (1, heads):
        return given.expand(sequences, heads)
    of_each = {
        ATTENTION: tuple(key.shape[:3]),
        VARLEN: (key.shape[2], heads),
        PAGED: (key.shape[0], key.shape[2], heads),
    }[form]
    if shape == of_each:
        return given if form == ATTENTION else given.T[None] if form == VARLEN else given.transpose(1, 2)
    raise ValueError(
        f"{name} must be a number, [kv_heads], [batch, kv_heads] or {FORMS[form]}, here {[sequences, heads]} or "
        f"{list(of_each)}, not {list(shape)}."
    )


def _of_each_key(scale: Tensor, shape: tuple[int, ...], call: Call) -> Tensor:
    """A scale of more, as one of each key without a copy. Raises `ValueError` where sequences lie apart from where
    their scales do."""
    if scale.numel() > 1 and _form(call) != ATTENTION:
        raise ValueError("k_scale and v_scale must both be of each key, or neither, of packed sequences and pages.")
    return scale[..., None].expand(shape)


def dequantised(call: Call) -> Call:
    """The call as torch computes it: keys and values in query's dtype, times their scales; of pages those of the
    table's sequences, each with a copy of its own. Nothing waits for the device."""
    key, value = call.key, call.value
    scales = [call.term(K_SCALE), call.term(V_SCALE)]
    terms = list(call.terms)
    terms[K_SCALE] = terms[V_SCALE] = None
    table, starts = call.term(TABLE), call.term(STARTS_K)
    if table is not None:
        places = table.long().clamp(0, key.shape[0] - 1).flatten()
        key, value = (tensor.view(torch.uint8)[places].view(tensor.dtype) for tensor in (key, value))
        own = torch.arange(len(places), dtype=table.dtype, device=table.device)
        terms[TABLE] = own.view(table.shape)
        scales = [_of_pages(scale, places, table) for scale in scales]
    elif starts is not None:
        rows = torch.arange(key.shape[2], device=key.device)
        sequence = torch.bucketize(rows, starts[1:].long(), right=True).clamp(max=len(starts) - 2)
        scales = [_of_rows(scale, sequence) for scale in scales]
    made = []
    for tensor, scale in zip((key, value), scales, strict=True):
        assert scale is not None
        made.append((tensor.float() * scale[(..., *[None] * (4 - scale.dim()))]).to(call.query.dtype))
    kept = () if all(term is None for term in terms) else tuple(terms)
    return replace(call, key=made[0], value=made[1], terms=kept, finite=False)


def _of_pages(scale: Tensor | None, places: Tensor, table: Tensor) -> Tensor:
    """Of each page that the table names: `[pages, kv_heads or 1]`, or with a last dimension of rows."""
    assert scale is not None
    if scale.dim() == 3:
        return scale[places]
    return scale if len(scale) == 1 else scale.repeat_interleave(table.shape[1], 0)


def _of_rows(scale: Tensor | None, sequence: Tensor) -> Tensor:
    assert scale is not None
    return scale if scale.dim() == 3 or len(scale) == 1 else scale[sequence].T[None]
