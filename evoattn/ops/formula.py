"""Attention by its formula: variants that SDPA lacks, and the log-sum-exp, which it does not give."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evoattn.ops.torch_sdpa import sdpa, without_unseen
from evoattn.ops.variant import Variant

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of the formula, which SDPA takes too."""
SCORES_PER_CHUNK = 1 << 26
"""Scores that are made at once: 256 MiB in float32."""


def _require(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Raise `ValueError` for what SDPA refuses, and the formula would answer to: integers rounded to 0, complex numbers
    without their imaginary parts, no heads."""
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if query.dtype not in FLOATS or not query.dtype == key.dtype == value.dtype:
        found = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in (query, key, value))
        raise ValueError(f"query, key and value must be of one dtype of real floating-point numbers, not {found}.")
    if kv_heads != heads and not enable_gqa:
        raise ValueError(f"{kv_heads} K/V heads for {heads} query heads need enable_gqa=True.")
    if kv_heads != heads and (not kv_heads or heads % kv_heads):
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} K/V heads.")


def _wide(tensor: Tensor) -> Tensor:
    """In float32, or float64 as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def attention(
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
    can say what is asked, else the formula, in float32 (float64 in itself) and some rows at a time. A query that sees
    no key has the output 0.

    query `[batch, heads, seqlen_q, head_dim]`, key and value `[batch, kv_heads, seqlen_k, head_dim]`; the answer has
    query's shape, the log-sum-exp is `[batch, heads, seqlen_q]` float32. `scores_at_once` bounds the scores in memory.
    Raises `ValueError` where fewer K/V heads come without `enable_gqa` or do not divide query's, for several dtypes or
    one of no real floating-point numbers, and what SDPA raises.
    """
    _require(query, key, value, enable_gqa)
    if variant.seqused is not None and not variant.finite:
        key, value = keys_in_use(key, value, variant.seqused, variant.table)
    seqlen_q, seqlen_k, heads = query.shape[-2], key.shape[-2], query.shape[-3]
    ends = seqlen_k if variant.seqused is None else variant.seqused[:, None, None, None]
    diagonal = 0 if is_causal and causal == "upper_left" else ends - seqlen_q
    groups = heads // max(1, key.shape[-3])
    factor = 1 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
    if not variant.softcap and variant.sinks is None and variant.slopes is None and not wants_lse:
        hidden = _hidden(query, key, variant, slice(0, seqlen_q), diagonal, is_causal)
        mask = variant.bias if hidden is None else ~hidden
        if variant.bias is not None and hidden is not None:
            mask = variant.bias.masked_fill(hidden, -math.inf)
        mask = mask if mask is None else torch.atleast_2d(mask)  # SDPA takes no fewer dimensions
        answer = sdpa(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
        return answer if mask is None else without_unseen(answer, mask), None
    keys, values = (t.repeat_interleave(groups, dim=-3) for t in (_wide(key), value))
    rows = max(1, scores_at_once // max(1, math.prod(query.shape[:-2]) * seqlen_k))
    answers, sums = [], []
    for first in range(0, max(1, seqlen_q), rows):
        chunk = slice(first, min(first + rows, seqlen_q))
        scores = (_wide(query[..., chunk, :]) * factor) @ keys.transpose(-1, -2)
        if variant.softcap:
            scores = variant.softcap * torch.tanh(scores / variant.softcap)
        if variant.slopes is not None or variant.bias is not None:
            scores = scores + _added(query, key, variant, chunk, diagonal)
        if (hidden := _hidden(query, key, variant, chunk, diagonal, is_causal)) is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        unseen = torch.isneginf(scores).all(-1, keepdim=True)
        if variant.sinks is not None:
            column = variant.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :seqlen_k].masked_fill(unseen, 0)
        answers.append(weights.to(query.dtype) @ values)
        sums.append(torch.logsumexp(scores, dim=-1))
    return torch.cat(answers, dim=-2), torch.cat(sums, dim=-1).float() if wants_lse else None


def keys_in_use(key: Tensor, value: Tensor, used: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """K and V `[batch, kv_heads, seqlen_k, head_dim]` with zeros behind the last key in use, where anything may lie:
    copies, out of pages `[pages, kv_heads, page, head_dim]` if there is a table `[batch, pages]`. Waits for nothing."""
    if table is not None:
        places = table.long().clamp(0, key.shape[0] - 1)
        key, value = (t.transpose(1, 2)[places].flatten(1, 2).transpose(1, 2) for t in (key, value))
    behind = (torch.arange(key.shape[2], device=key.device) >= used[:, None])[:, None, :, None]
    return key.masked_fill(behind, 0), value.masked_fill(behind, 0)


def log_sum_exp(query: Tensor, key: Tensor, *, is_causal: bool, scale: float | None, causal: str) -> Tensor:
    """Natural logarithm of the sum of exponentials of each query's masked and scaled scores, `[batch, heads,
    seqlen_q]` float32.

    `-inf` for a query that sees no key. Scores are made in float32 (of float64 in itself), some rows at a time. Heads
    and batches are broadcast as SDPA broadcasts them.
    """
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    factor = 1 / math.sqrt(max(1, query.shape[-1])) if scale is None else scale
    keys = _wide(key).transpose(-1, -2)
    if query.dim() > 2:
        keys = keys.repeat_interleave(max(1, query.shape[-3] // max(1, key.shape[-3])), dim=-3)
    rows = max(1, SCORES_PER_CHUNK // max(1, math.prod(query.shape[:-2]) * seqlen_k))
    diagonal = seqlen_k - seqlen_q if causal == "lower_right" else 0
    parts = []
    for first in range(0, seqlen_q, rows):
        chunk = slice(first, min(first + rows, seqlen_q))
        scores = (_wide(query[..., chunk, :]) * factor) @ keys
        if (hidden := _hidden(query, key, Variant(), chunk, diagonal, is_causal)) is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        parts.append(torch.logsumexp(scores, dim=-1))
    if not parts:
        heads = torch.broadcast_shapes(query.shape[:-2], keys.shape[:-2])
        return query.new_empty((*heads, 0), dtype=torch.float32)
    return torch.cat(parts, dim=-1).float()


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
