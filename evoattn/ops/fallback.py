"""What torch computes where no kernel of ours runs: `scaled_dot_product_attention`, also under the other causal mask
and with a log-sum-exp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evoattn.ops.variant import ALIGNMENT, Variant

SCORES_PER_CHUNK = 1 << 26
"""Scores that the log-sum-exp makes at once: 256 MiB in float32."""
SDPA = torch._C._nn.scaled_dot_product_attention
"""`torch.nn.functional.scaled_dot_product_attention` itself, whatever `evoattn.sdpa` puts in its place."""
MATH = torch._scaled_dot_product_attention_math
"""By the formula, on any device."""


def lower_right_mask(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """Bool `[seqlen_q, seqlen_k]`: query i sees keys j <= i + seqlen_k - seqlen_q."""
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).tril(diagonal=seqlen_k - seqlen_q)


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


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
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
            grouped = enable_gqa and all(tensor.shape[-3] for tensor in tensors)  # it divides by the heads then
            return MATH(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=grouped)[0]
        if all(tensor.is_cuda for tensor in tensors):
            query, key, value = map(aligned, tensors)
    return SDPA(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def _fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether columns of query and key, and rows of key and value, are as many."""
    return query.shape[-1] == key.shape[-1] and key.shape[-2] == value.shape[-2]


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a strided tensor of three dimensions or more."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested and tensor.dim() > 2


def _watched() -> bool:
    """Whether a compiler, a transform or a trace is at work: tensors have no addresses, or sizes of one call only."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None


def without_unseen(answer: Tensor, mask: Tensor) -> Tensor:
    """The answer with 0 for queries of which the mask hides every key: some of SDPA's kernels give them the mean of all
    values, or NaN."""
    hidden = ~mask if mask.dtype == torch.bool else torch.isneginf(mask)
    return answer.masked_fill(hidden.all(-1, keepdim=True), 0)


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None, enable_gqa: bool, causal: str
) -> Tensor:
    """SDPA's answer; its errors are raised as they are. Under `causal="lower_right"` a query that sees no key has the
    output 0.
    """
    if is_causal and causal == "lower_right" and query.shape[-2] != key.shape[-2]:
        mask = lower_right_mask(query.shape[-2], key.shape[-2], query.device)
        answer = sdpa(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
        return without_unseen(answer, mask) if query.shape[-2] > key.shape[-2] else answer
    return sdpa(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal: str,
    return_lse: bool,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A call of `evoattn.attention` without a variant: the answer, in `out` if there is one, with `return_lse` the
    log-sum-exp beside it."""
    answer = attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, causal=causal)
    answer = answer if out is None else out.copy_(answer)
    if not return_lse:
        return answer
    return answer, log_sum_exp(query, key, is_causal=is_causal, scale=scale, causal=causal)


def varied(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: Variant,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal: str,
    wants_lse: bool,
    scores_at_once: int = SCORES_PER_CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """The answer of a variant of attention, and the log-sum-exp where it is wanted: SDPA with a mask tensor where it
    can say what is asked, else the formula, in float32 and some rows at a time. A query that sees no key has the
    output 0.

    query `[batch, heads, seqlen_q, head_dim]`, key and value `[batch, kv_heads, seqlen_k, head_dim]`; the answer has
    query's shape, the log-sum-exp is `[batch, heads, seqlen_q]` float32. `scores_at_once` bounds the scores in memory.
    Raises `ValueError` where fewer K/V heads come without `enable_gqa`, and what SDPA raises.
    """
    if variant.starts is not None:
        from evoattn.ops import padded  # it imports this module

        return padded.attention(query, key, value, variant, is_causal=is_causal, scale=scale, wants_lse=wants_lse)
    if variant.seqused is not None and not variant.finite:
        key, value = keys_in_use(key, value, variant.seqused, variant.table)
    seqlen_q, seqlen_k, heads = query.shape[-2], key.shape[-2], query.shape[-3]
    if key.shape[-3] != heads and not enable_gqa:
        raise ValueError(f"{key.shape[-3]} K/V heads for {heads} query heads need enable_gqa=True.")
    ends = seqlen_k if variant.seqused is None else variant.seqused[:, None, None, None]
    diagonal = 0 if is_causal and causal == "upper_left" else ends - seqlen_q
    groups = heads // max(1, key.shape[-3])
    factor = 1 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
    if not variant.softcap and variant.sinks is None and variant.slopes is None and not wants_lse:
        hidden = _hidden(query, key, variant, slice(0, seqlen_q), diagonal, is_causal)
        mask = variant.bias if hidden is None else ~hidden
        if variant.bias is not None and hidden is not None:
            mask = variant.bias.masked_fill(hidden, -math.inf)
        answer = sdpa(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
        return answer if mask is None else without_unseen(answer, mask), None
    keys, values = (t.repeat_interleave(groups, dim=-3) for t in (key.float(), value))
    rows = max(1, scores_at_once // max(1, math.prod(query.shape[:-2]) * seqlen_k))
    answers, sums = [], []
    for first in range(0, max(1, seqlen_q), rows):
        chunk = slice(first, min(first + rows, seqlen_q))
        scores = (query[..., chunk, :].float() * factor) @ keys.transpose(-1, -2)
        if variant.softcap:
            scores = variant.softcap * torch.tanh(scores / variant.softcap)
        if variant.slopes is not None or variant.bias is not None:
            scores = scores + _added(query, key, variant, chunk, diagonal)
        if (hidden := _hidden(query, key, variant, chunk, diagonal, is_causal)) is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        unseen = torch.isneginf(scores).all(-1, keepdim=True)
        if variant.sinks is not None:
            column = variant.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :seqlen_k].masked_fill(unseen, 0)
        answers.append(weights.to(query.dtype) @ values)
        sums.append(torch.logsumexp(scores, dim=-1))
    return torch.cat(answers, dim=-2), torch.cat(sums, dim=-1) if wants_lse else None


def keys_in_use(key: Tensor, value: Tensor, used: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """K and V `[batch, kv_heads, seqlen_k, head_dim]` with zeros behind the last key in use, where anything may lie:
    copies, out of pages `[pages, kv_heads, page, head_dim]` if there is a table `[batch, pages]`. Waits for nothing."""
    if table is not None:
        places = table.long().clamp(0, key.shape[0] - 1)
        key, value = (t.transpose(1, 2)[places].flatten(1, 2).transpose(1, 2) for t in (key, value))
    behind = (torch.arange(key.shape[2], device=key.device) >= used[:, None])[:, None, :, None]
    return key.masked_fill(behind, 0), value.masked_fill(behind, 0)


def _added(query: Tensor, key: Tensor, variant: Variant, rows: slice, diagonal: int | Tensor) -> Tensor:
    """What slopes or a bias add to the scores of some rows: float32 slopes, a bias in its own dtype."""
    if variant.bias is not None:
        return variant.bias if variant.bias.dim() < 2 or variant.bias.shape[-2] == 1 else variant.bias[..., rows, :]
    assert variant.slopes is not None
    queries = torch.arange(rows.start, rows.stop, device=query.device)[:, None]
    distance = (torch.arange(key.shape[-2], device=query.device) - queries - diagonal).abs()
    return -variant.slopes.float()[:, None, None] * distance


def _hidden(
    query: Tensor, key: Tensor, variant: Variant, rows: slice, diagonal: int | Tensor, is_causal: bool
) -> Tensor | None:
    """Bool `[rows, seqlen_k]`, or `[batch, 1, rows, seqlen_k]`: the keys that the mask and the window hide, and those
    that are not in use; None if there are none."""
    if not is_causal and variant.window is None and variant.seqused is None:
        return None
    middle = torch.arange(rows.start, rows.stop, device=query.device)[:, None] + diagonal
    keys = torch.arange(key.shape[-2], device=query.device)
    hidden = torch.zeros(middle.shape[-2], len(keys), dtype=torch.bool, device=query.device)
    if variant.seqused is not None:
        hidden = hidden | (keys >= variant.seqused[:, None, None, None])
    past, ahead = variant.window or (-1, -1)
    if is_causal:
        ahead = 0
    if ahead >= 0:
        hidden = hidden | (keys > middle + ahead)
    if past >= 0:
        hidden = hidden | (keys < middle - past)
    return hidden


def log_sum_exp(query: Tensor, key: Tensor, *, is_causal: bool, scale: float | None, causal: str) -> Tensor:
    """Natural logarithm of the sum of exponentials of each query's masked and scaled scores, `[batch, heads,
    seqlen_q]` float32.

    `-inf` for a query that sees no key. Scores are made in float32, some rows at a time.
    """
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    factor = 1 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
    keys = key.float().transpose(-1, -2)
    if query.dim() > 2:
        keys = keys.repeat_interleave(query.shape[-3] // max(1, key.shape[-3]), dim=-3)
    rows = max(1, SCORES_PER_CHUNK // max(1, math.prod(query.shape[:-2]) * seqlen_k))
    diagonal = seqlen_k - seqlen_q if causal == "lower_right" else 0
    parts = []
    for first in range(0, seqlen_q, rows):
        chunk = slice(first, min(first + rows, seqlen_q))
        scores = (query[..., chunk, :].float() * factor) @ keys
        if (hidden := _hidden(query, key, Variant(), chunk, diagonal, is_causal)) is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        parts.append(torch.logsumexp(scores, dim=-1))
    return torch.cat(parts, dim=-1) if parts else query.new_empty(query.shape[:-1], dtype=torch.float32)
