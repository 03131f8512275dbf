"""What no kernel has: dropout, by torch's own attention with a mask tensor; and what gradients by the formula need."""

from typing import Any

import torch
from torch import Tensor

from evoattn.integrations.flash_attn.options import OPEN, Options
from evoattn.ops import torch_answer

REFUSED = "dropout_p goes without softcap, sinks and the log-sum-exp: torch's dropout knows none of them."
Sequences = tuple[Tensor, Tensor, int]
"""First rows, lengths and the longest length."""
Places = tuple[slice, int, int]
"""Some rows, the number of all of them, and that of keys."""


def of_batch(query: Tensor, key: Tensor, value: Tensor, options: Options, used: Tensor | None = None) -> Tensor:
    """Attention with dropout of `[batch, heads, rows, head_dim]`; `used` `[batch]` says how many keys there are.
    Raises `ValueError` beside what torch cannot say."""
    if options.softcap or options.sinks is not None or options.return_lse:
        raise ValueError(REFUSED)
    places = slice(0, query.shape[2]), query.shape[2], key.shape[2]
    mask = seen(places, options, used, query.device)
    if options.slopes is not None:
        bias = added(places, options, used, query.dtype)
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    words: dict[str, Any] = dict(scale=options.scale, enable_gqa=True)
    answer = torch_answer.sdpa(query, key, value, mask, options.dropout_p, **words)
    return answer if mask is None else torch_answer.without_unseen(answer, mask)


def of_sequences(q: Tensor, k: Tensor, v: Tensor, queries: Sequences, keys: Sequences, options: Options) -> Tensor:
    """The same of packed sequences `[rows, heads, head_dim]`, padded to the longest: queries in front, so that the last
    one stays on the diagonal, keys behind."""
    one_q = padded(q, queries, at_end=True).transpose(1, 2)
    one_k, one_v = (padded(tensor, keys, at_end=False).transpose(1, 2) for tensor in (k, v))
    answer = of_batch(one_q, one_k, one_v, options, keys[1]).transpose(1, 2)
    return unpadded(answer, q.shape[0], queries, at_end=True)


def padded(tensor: Tensor, sequences: Sequences, at_end: bool) -> Tensor:
    """`[sequences, longest, …]` of packed rows; padding holds other rows. `at_end`: padding is in front."""
    rows = _rows(sequences, at_end)[0].clamp(0, max(0, tensor.shape[0] - 1))
    return tensor[rows] if tensor.shape[0] else tensor.new_zeros(*rows.shape, *tensor.shape[1:])


def unpadded(tensor: Tensor, total: int, sequences: Sequences, at_end: bool) -> Tensor:
    """The `total` packed rows of what `padded` made; rows of no sequence are 0."""
    rows, is_real = _rows(sequences, at_end)
    places = torch.where(is_real & (rows < total), rows, total).flatten()
    out = tensor.new_zeros(total + 1, *tensor.shape[2:])
    return out.index_put((places,), tensor.flatten(0, 1))[:-1]


def _rows(sequences: Sequences, at_end: bool) -> tuple[Tensor, Tensor]:
    """The row of each place `[sequences, longest]`, and whether it is the sequence's own."""
    first, lengths, most = sequences
    column = torch.arange(most, device=first.device)
    lengths = lengths.long()[:, None]
    if at_end:
        column = column - most + lengths
    return first.long()[:, None] + column, (column >= 0) & (column < lengths)


def seen(places: Places, options: Options, used: Tensor | None, device: torch.device) -> Tensor | None:
    """Bool `[rows, keys]`, or `[batch, 1, rows, keys]`: the keys that masks show; None where all are seen."""
    rows, _, seqlen_k = places
    middle, keys = _diagonal(places, used, device), torch.arange(seqlen_k, device=device)
    shown: list[Tensor] = [] if used is None else [keys < used.long()[:, None, None, None]]
    past, ahead = options.window[0], 0 if options.causal else options.window[1]
    if past != OPEN:
        shown.append(keys >= middle - past)
    if ahead != OPEN:
        shown.append(keys <= middle + ahead)
    if options.chunk > 0:
        shown.append(keys // options.chunk == torch.div(middle, options.chunk, rounding_mode="floor"))
    mask = None
    for one in shown:
        mask = one if mask is None else mask & one
    return None if mask is None else mask.expand(*mask.shape[:-2], rows.stop - rows.start, seqlen_k)


def added(places: Places, options: Options, used: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What slopes add to the scores."""
    assert options.slopes is not None
    slopes = options.slopes.float().view(-1, options.slopes.shape[-1], 1, 1)
    keys = torch.arange(places[2], device=slopes.device)
    return (-slopes * (keys - _diagonal(places, used, slopes.device)).abs()).to(dtype)


def _diagonal(places: Places, used: Tensor | None, device: torch.device) -> Tensor:
    """The key on the diagonal of each of some rows: `[rows, 1]`, or `[batch, 1, rows, 1]`."""
    rows, seqlen_q, seqlen_k = places
    ends = seqlen_k if used is None else used.long()[:, None, None, None]
    return torch.arange(rows.start, rows.stop, device=device)[:, None] + (ends - seqlen_q)
