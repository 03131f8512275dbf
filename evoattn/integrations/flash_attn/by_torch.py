"""Dropout, which no kernel has: torch's own attention with a mask tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evoattn.integrations.flash_attn.options import OPEN, Options
from evoattn.ops import torch_answer

REFUSED = "dropout_p goes without softcap, sinks and the log-sum-exp: torch's dropout knows none of them."
Sequences = tuple[Tensor, Tensor, int]
"""First rows, lengths and the longest length."""


def of_batch(query: Tensor, key: Tensor, value: Tensor, options: Options, used: Tensor | None = None) -> Tensor:
    """Attention with dropout of `[batch, heads, rows, head_dim]`; `used` `[batch]` says how many keys there are.
    Raises `ValueError` beside what torch cannot say."""
    if options.softcap or options.sinks is not None or options.return_lse:
        raise ValueError(REFUSED)
    mask = _mask(query, key, options, used)
    words: dict[str, Any] = dict(scale=options.scale, enable_gqa=True)
    answer = torch_answer.sdpa(query, key, value, mask, options.dropout_p, **words)
    return answer if mask is None else torch_answer.without_unseen(answer, mask)


def with_dropout(q: Tensor, k: Tensor, v: Tensor, queries: Sequences, keys: Sequences, options: Options) -> Tensor:
    """The same of packed sequences `[rows, heads, head_dim]`, padded to the longest: queries in front, keys behind."""
    first, lengths, most = queries
    rows = (first + lengths).long()[:, None] - most + torch.arange(most, device=q.device)
    columns = keys[0].long()[:, None] + torch.arange(keys[2], device=q.device)
    padded = q[rows.clamp(0, max(0, q.shape[0] - 1))]
    key, value = (tensor[columns.clamp(0, max(0, tensor.shape[0] - 1))] for tensor in (k, v))
    answer = of_batch(*(t.transpose(1, 2) for t in (padded, key, value)), options, keys[1]).transpose(1, 2)
    is_row = torch.arange(-most, 0, device=q.device) >= -lengths.long()[:, None]
    places = torch.where(is_row & (rows < q.shape[0]), rows, q.shape[0]).flatten()
    out = q.new_zeros(q.shape[0] + 1, q.shape[1], v.shape[-1])
    return out.index_put((places,), answer.flatten(0, 1))[:-1]


def _mask(query: Tensor, key: Tensor, options: Options, used: Tensor | None) -> Tensor | None:
    """What SDPA takes for the mask and the slopes: bool, or added to the scores; None where all is seen."""
    seqlen_q, seqlen_k, device = query.shape[2], key.shape[2], query.device
    ends = seqlen_k if used is None else used.long()[:, None, None, None]
    middle = torch.arange(seqlen_q, device=device)[:, None] + (ends - seqlen_q)
    keys = torch.arange(seqlen_k, device=device)
    seen: list[Tensor] = [] if used is None else [keys < ends]
    past, ahead = options.window[0], 0 if options.causal else options.window[1]
    if past != OPEN:
        seen.append(keys >= middle - past)
    if ahead != OPEN:
        seen.append(keys <= middle + ahead)
    if options.chunk > 0:
        seen.append(keys // options.chunk == torch.div(middle, options.chunk, rounding_mode="floor"))
    mask = None
    for one in seen:
        mask = one if mask is None else mask & one
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], seqlen_q, seqlen_k)
    if options.slopes is None:
        return mask
    slopes = options.slopes.float().view(-1, options.slopes.shape[-1], 1, 1)
    added = (-slopes * (keys - middle).abs()).to(query.dtype)
    return added if mask is None else added.masked_fill(~mask, -torch.inf)
