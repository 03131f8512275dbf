"""Packed sequences where no kernel of ours runs: torch's `varlen_attn`, or SDPA over sequences of one length."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from evoattn.ops import formula
from evoattn.ops.torch_sdpa import is_aligned
from evoattn.ops.variant import Variant

LEAST_CAPABILITY = (8, 0)
"""CUDA compute capability that `varlen_attn` needs."""
MOST_HEAD_DIM = 256
"""The largest head_dim that `varlen_attn` takes."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: Variant,
    *,
    is_causal: bool,
    scale: float | None,
    wants_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """The answer, and the log-sum-exp where it is wanted; the causal mask ends in the lower right corner of each
    sequence. Nothing waits for the device.

    query `[1, heads, total_q, head_dim]`, key and value `[1, kv_heads, total_k, head_dim]`; the answer has query's
    shape, the log-sum-exp is `[1, heads, total_q]` float32.
    """
    if not (query.shape[2] and key.shape[2]):
        return _of_nothing(query, value, variant, wants_lse)
    if not wants_lse:
        answer = _by_varlen_attn(query, key, value, variant, is_causal, scale)
        if answer is not None:
            return answer, None
    assert variant.starts is not None
    starts_q, starts_k = (tensor.long() for tensor in variant.starts)
    most_q, most_k = variant.longest
    # Keys begin at column 0, and queries end at the last row, so that the diagonal of a sequence's own ends is that of
    # its keys in use.
    columns, rows = (torch.arange(most, device=query.device) for most in (most_k, most_q))
    keys, values = (_gathered(tensor, starts_k[:-1, None] + columns) for tensor in (key, value))
    queries = _gathered(query, starts_q[1:, None] - most_q + rows)
    dense = replace(variant, starts=None, longest=(0, 0), seqused=starts_k[1:] - starts_k[:-1])
    answer, lse = formula.attention(
        queries,
        keys,
        values,
        dense,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=True,
        causal="lower_right",
        wants_lse=wants_lse,
    )
    packed = torch.arange(query.shape[2], device=query.device)
    # Rows past the last sequence take part in it: after an index out of range a process can no longer use the device.
    sequence = torch.bucketize(packed, starts_q[1:], right=True).clamp(max=len(starts_q) - 2)
    row = (packed - starts_q[1:][sequence] + most_q).clamp(0, most_q - 1)
    packed_answer = answer.transpose(1, 2)[sequence, row].transpose(0, 1)[None]
    return packed_answer, None if lse is None else lse.transpose(1, 2)[sequence, row].transpose(0, 1)[None]


def _gathered(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows `[sequences, length]` of `[1, heads, total, head_dim]`: `[sequences, heads, length, head_dim]`; of rows that
    there are not, others."""
    return tensor[0].transpose(0, 1)[rows.clamp(0, tensor.shape[2] - 1)].transpose(1, 2)


def _of_nothing(query: Tensor, value: Tensor, variant: Variant, wants_lse: bool) -> tuple[Tensor, Tensor | None]:
    """As `attention`, without a query or without a key."""
    answer = query.new_zeros(*query.shape[:3], value.shape[3])
    if not wants_lse:
        return answer, None
    if variant.sinks is not None:
        return answer, variant.sinks.float()[None, :, None].expand(query.shape[:3]).contiguous()
    return answer, torch.full(query.shape[:3], float("-inf"), device=query.device)


def _by_varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, variant: Variant, is_causal: bool, scale: float | None
) -> Tensor | None:
    """Torch's own, where it can say what is asked; else None."""
    if torch.compiler.is_compiling():  # which cannot look through the search for it
        return None
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16) or variant.starts is None:
        return None
    if variant.softcap or variant.sinks is not None or variant.slopes is not None:
        return None
    if query.shape[3] != value.shape[3] or query.shape[3] % 8 or query.shape[3] > MOST_HEAD_DIM:
        return None
    if not all(map(is_aligned, (query, key, value))):
        return None
    if torch.cuda.get_device_capability(query.device) < LEAST_CAPABILITY:
        return None
    from evoattn.peers import torch_varlen  # with it the peers, which other callers need not wait for
    from evoattn.peers.variants import PeerRefused

    try:
        function = torch_varlen.bound(
            torch_varlen.find(),
            causal=is_causal,
            window=variant.window,
            scale=scale,
            group_size=query.shape[1] // key.shape[1],
        )
    except (ImportError, PeerRefused):
        return None
    tensors = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    starts = (tensor.to(torch.int32) for tensor in variant.starts)
    return function(*tensors, *starts, *variant.longest).transpose(0, 1)[None]
