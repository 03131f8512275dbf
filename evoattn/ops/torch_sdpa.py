"""`torch.nn.functional.scaled_dot_product_attention` itself, and what it has to be kept from."""

from __future__ import annotations

import torch
from torch import Tensor

from evoattn.ops.autocast import autocast, has_autocast
from evoattn.ops.variant import ALIGNMENT

SDPA = torch._C._nn.scaled_dot_product_attention
"""`torch.nn.functional.scaled_dot_product_attention` itself, whatever `evoattn.sdpa` puts in its place."""
MATH = torch._scaled_dot_product_attention_math
"""By the formula, on any device."""
_PLAIN = Tensor, torch.nn.Parameter


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's own; its errors are raised as they are.

    Tensors without elements go to its formula, as its kernels divide by their sizes, and those that do not fit, as the
    formula raises where kernels read past the end or end the process. On a GPU it gets copies of what lies at odd
    addresses: its kernels load 16 bytes at once without a look at where tensors begin
    (https://github.com/pytorch/pytorch/issues/183484), after which a process can no longer use the device.
    """
    tensors = query, key, value
    if not _watched() and all(map(_is_plain, tensors)):
        if 0 in (*query.shape, *key.shape, *value.shape) or not _fit(query, key, value):
            if has_autocast(query.device.type):  # which knows SDPA, not its formula
                query, key, value = autocast(query.device.type, query, key, value)
                attn_mask = autocast(query.device.type, attn_mask)[0] if isinstance(attn_mask, Tensor) else attn_mask
            grouped = enable_gqa and all(tensor.shape[-3] for tensor in tensors)  # it divides by the heads then
            return MATH(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)[0]
        if all(tensor.is_cuda for tensor in tensors):
            query, key, value = map(aligned, tensors)
            attn_mask = None if attn_mask is None else readable(attn_mask, key.shape[-2])
    return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def is_aligned(tensor: Tensor) -> bool:
    """Whether rows lie at multiples of 16 bytes in its memory, each in one piece: FlashAttention refuses others, or
    reads them by misaligned loads."""
    *strides, last = tensor.stride()
    places = tensor.storage_offset(), *(s for s, size in zip(strides, tensor.shape, strict=False) if size > 1)
    return last == 1 and not any(place * tensor.element_size() % ALIGNMENT for place in places)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy in one piece where it begins, or its rows of whole 16 bytes lie, at other places."""
    offset, row = (count * tensor.element_size() % ALIGNMENT for count in (tensor.storage_offset(), tensor.shape[-1]))
    return tensor if is_aligned(tensor) or (row and not offset) else tensor.clone(memory_format=torch.contiguous_format)


def readable(mask: Tensor, keys: int) -> Tensor:
    """The mask, or a copy where torch's kernels would load numbers from places that are no multiples of 16 bytes: of
    one column for all keys, as of torch 2.11, or where it begins or its rows lie so."""
    if not _is_strided(mask) or not mask.dim():
        return mask
    if mask.shape[-1] == 1 < keys:
        return mask.expand(*mask.shape[:-1], keys).contiguous()
    return mask if mask.dtype == torch.bool else aligned(mask)


def _is_strided(tensor: Tensor) -> bool:
    """Whether it has strides and is of no subclass but `torch.nn.Parameter`, as a learned bias is."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def _fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether columns of query and key, and rows of key and value, are as many."""
    return query.shape[-1] == key.shape[-1] and key.shape[-2] == value.shape[-2]


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a strided tensor of three dimensions or more."""
    return _is_strided(tensor) and tensor.dim() > 2


def _watched() -> bool:
    """Whether a compiler, a transform or a trace is at work: tensors have no addresses, or sizes of one call only."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None


def lower_right_mask(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """Bool `[seqlen_q, seqlen_k]`: query i sees keys j <= i + seqlen_k - seqlen_q."""
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).tril(diagonal=seqlen_k - seqlen_q)


def without_unseen(answer: Tensor, mask: Tensor) -> Tensor:
    """The answer with 0 for queries of which the mask hides every key: some of SDPA's kernels give them the mean of all
    values, or NaN."""
    hidden = ~mask if mask.dtype == torch.bool else torch.isneginf(mask)
    return answer.masked_fill(hidden.all(-1, keepdim=True), 0)
