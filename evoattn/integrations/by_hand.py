"""Attention as the formula says it, where neither a kernel nor "sdpa" computes what a model asks for."""

import math
from typing import Any

import torch
from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """`[batch, seqlen, heads, head_dim]`, with all scores in memory. `mask` is boolean, or added to the scores. A query
    that sees no key, as padding before a prompt, has the output 0, as from "sdpa": NaN would reach real tokens as the
    value of a key of the next layer."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (1 / math.sqrt(query.shape[-1]) if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if mask is None and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    unseen = torch.isneginf(scores).all(-1, keepdim=True)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1).masked_fill(unseen, 0).to(query.dtype)
    weights = torch.nn.functional.dropout(weights, dropout)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous()


def window_mask(query: Tensor, key: Tensor, window: int) -> Tensor:
    """Bool `[seqlen_q, seqlen_k]` of a causal layer: the last `window` keys up to each query's own, which for a single
    query is the last key. More keys than queries are an empty static cache otherwise, whose first ones are theirs."""
    queries, keys = query.shape[2], key.shape[2]
    own = torch.arange(queries, device=query.device)[:, None] + (keys - 1 if queries == 1 else 0)
    places = torch.arange(keys, device=query.device)
    return (places <= own) & (places > own - window)


def selected(indices: Tensor, mask: Tensor | None, query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """The mask with only those keys left that each query selects, which `indices` `[batch, seqlen_q, count]` name."""
    if mask is None and causal:
        mask = window_mask(query, key, key.shape[2])
    chosen = torch.zeros(*indices.shape[:2], key.shape[2], dtype=torch.bool, device=key.device)
    chosen = chosen.scatter_(-1, indices.long(), True)[:, None]
    if mask is None or mask.dtype == torch.bool:
        return chosen if mask is None else mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def of_blocks(
    module: Any, blocks: Tensor, mask: Tensor | None, query: Tensor, key: Tensor, positions: Tensor | None
) -> Tensor:
    """The mask with only those blocks of keys left that each query selects, as the layer makes it for "sdpa" (MiniMax
    M3). Raises `ValueError` for a layer that cannot."""
    make = getattr(getattr(module, "indexer", None), "build_block_mask", None)
    if make is None:
        raise ValueError('evoattn serves no attention over selected blocks of keys; load this model with "sdpa".')
    queries, keys = query.shape[2], key.shape[2]
    if positions is None:
        positions = torch.arange(keys - queries, keys, device=query.device)
    positions = (positions if positions.dim() > 1 else positions[None]).expand(query.shape[0], -1)
    made: Tensor = make(blocks, mask, keys, query.dtype, query.device, positions)
    return made
