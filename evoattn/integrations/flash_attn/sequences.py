"""Attention of sequences that lie packed in the rows of a tensor, over keys that lie anywhere. Nothing waits for the
device: what a call of a kernel is made of follows from shapes and from the longest lengths, which callers know."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evoattn.integrations.flash_attn import by_torch
from evoattn.integrations.flash_attn.options import Options, answered, score_of, wants_gradients
from evoattn.ops.call import Answer, answer_dtype
from evoattn.ops.given import require_dims
from evoattn.ops.torch_answer import NoKernel

MOST_PADDING = 4
"""Rows that a class of sequences may be padded to, over the rows that there are."""


@dataclass(frozen=True)
class Queries:
    """Sequence i is `lengths[i]` rows from `bounds[i]` on, in the room up to `bounds[i + 1]`."""

    bounds: Tensor
    """`[sequences + 1]`, that is cu_seqlens."""
    longest: int
    used: Tensor | None = None
    """`[sequences]`; None where the rows fill the room."""
    uniform: bool | None = None
    """Whether each has `longest` rows, but for some at the end that have none. None where no rows lie behind the last
    sequence, so that their number says it."""

    def __post_init__(self) -> None:
        require_dims(1, "one dimension", cu_seqlens_q=self.bounds)

    @property
    def lengths(self) -> Tensor:
        return self.bounds[1:] - self.bounds[:-1] if self.used is None else self.used


@dataclass(frozen=True)
class Keys:
    """Sequence i is `lengths[i]` rows from `starts[i]` on; `starts` may be in any order."""

    starts: Tensor
    longest: int
    used: Tensor | None = None
    """`[sequences]`; None where the sequences lie end to end."""
    bounds: Tensor | None = None
    """cu_seqlens, where they do."""

    @property
    def lengths(self) -> Tensor:
        if self.used is not None:
            return self.used
        assert self.bounds is not None
        return self.bounds[1:] - self.bounds[:-1]


def over_rows(q: Tensor, k: Tensor, v: Tensor, queries: Queries, keys: Keys, options: Options) -> Answer:
    """Attention of packed queries `[total_q, heads, head_dim]` over rows `[total_k, kv_heads, head_dim]`. Rows of q
    between sequences get 0.

    `attention_varlen` takes sequences that lie end to end. So what lies between two of them is made a sequence too: the
    keys there get no queries, the queries there no keys."""
    if options.dropout_p:
        rows = queries.bounds[:-1], queries.lengths, queries.longest
        return by_torch.of_sequences(q, k, v, rows, (keys.starts, keys.lengths, keys.longest), options)
    if keys.longest == 1 and not options.return_lse and wants_gradients(q, k, v):
        return over_rows(q, k, v, queries, keys, replace(options, return_lse=True))[0]  # see `of_batch` in `cache.py`
    if queries.used is None and keys.used is None and keys.bounds is not None:
        starts_q, starts_k = queries.bounds, keys.bounds
    else:
        first, behind, ends = queries.bounds[:-1], queries.bounds[1:], keys.starts + keys.lengths
        if queries.used is None:
            starts_q, starts_k, parts = torch.stack((first, behind), dim=1), torch.stack((keys.starts, ends), dim=1), 2
        else:
            starts_q = torch.stack((first, first + queries.used, behind), dim=1)
            starts_k, parts = torch.stack((keys.starts, ends, ends), dim=1), 3
        if wants_gradients(q, k, v):
            q = _without_unused(q, first, queries.lengths)
            k, v = (_without_unused(tensor, keys.starts, keys.lengths) for tensor in (k, v))
        starts_q = torch.cat((starts_q.flatten(), queries.bounds[-1:]))
        starts_k = torch.nn.functional.pad(starts_k.flatten(), (0, 1), value=k.shape[0])
        options = options.of_sequences(torch.arange(len(first), device=q.device).repeat_interleave(parts))
    count = len(starts_q) - 1
    return answered(
        q,
        k,
        v,
        options,
        score_of(options, None, q.device),
        cu_seqlens_q=starts_q.to(torch.int32),
        cu_seqlens_k=starts_k.to(torch.int32),
        max_seqlen_q=max(queries.longest, -(-q.shape[0] // count)),  # rows behind the last sequence count too
        max_seqlen_k=max(keys.longest, -(-k.shape[0] // count)),
    )


def _without_unused(tensor: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Rows with 0 where no sequence has any: whatever is there would come into gradients as 0 · NaN."""
    changes = torch.zeros(tensor.shape[0] + 1, dtype=torch.int32, device=tensor.device)
    one = torch.ones_like(starts, dtype=torch.int32)
    for places, step in ((starts, one), (starts + lengths.clamp(min=0), -one)):
        changes.index_add_(0, places.long().clamp(0, tensor.shape[0]), step)
    return tensor.masked_fill((changes.cumsum(0)[:-1] <= 0)[:, None, None], 0)


@dataclass(frozen=True)
class Pages:
    """A cache of pages `[pages, page, kv_heads, head_dim]`, and which of them each sequence has."""

    k: Tensor
    v: Tensor
    table: Tensor
    """`[sequences, most pages]`."""
    used: Tensor
    """`[sequences]`: keys, those in front of `pad` among them."""
    pad: Tensor | None = None
    """`[sequences]`: the first key."""

    def of_sequences(self, which: Tensor, used: Tensor) -> Pages:
        pad = None if self.pad is None else self.pad[which]
        return replace(self, table=self.table[which], used=used, pad=pad)


def over_pages(q: Tensor, pages: Pages, options: Options) -> Answer:
    """Attention of queries `[batch, rows, heads, head_dim]`, each batch with its own pages."""
    score = score_of(options, pages.pad, q.device)
    return answered(q, pages.k, pages.v, options, score, block_table=pages.table, seqused_k=pages.used.to(torch.int32))


def packed_over_pages(q: Tensor, queries: Queries, pages: Pages, options: Options) -> Answer:
    """Attention of packed queries `[total_q, heads, head_dim]`, each sequence with its own pages.

    In one launch where there is a kernel for it. Else sequences are put into classes by their lengths (`classes` says
    how many a class can have), and each class is one launch over queries that are padded in front, so that the last row
    stays on its diagonal. What is in a class is decided on the device."""
    if queries.used is None and not torch.compiler.is_compiling():
        try:
            return _in_one_launch(q, queries, pages, options)
        except NoKernel:
            pass
    total, heads, _ = q.shape
    if wants_gradients(q, pages.k, pages.v):
        q = _without_unused(q, queries.bounds[:-1], queries.lengths)
    shape = total + 1, heads, pages.v.shape[-1]  # the last row takes what is padding
    out = q.new_zeros(shape, dtype=answer_dtype(q))
    lse = torch.full((total + 1, heads), -torch.inf, device=q.device) if options.return_lse else None
    lengths = queries.lengths.long()
    for shorter, most, room in classes(total, len(lengths), queries.longest):
        in_class = (lengths > shorter) & (lengths <= most)
        which = torch.argsort((~in_class).to(torch.int8), stable=True)[:room]
        is_in, length = in_class[which], lengths[which]
        column = torch.arange(most, device=q.device) - most
        rows = (queries.bounds[:-1][which] + length)[:, None] + column
        real = is_in[:, None] & (column >= -length[:, None]) & (rows < total)
        of_class = pages.of_sequences(which, pages.used[which].masked_fill(~is_in, 0))
        answer = over_pages(q[rows.clamp(0, total - 1)], of_class, options.of_sequences(which))
        places = torch.where(real, rows, total).flatten()
        output, sums = (answer, None) if isinstance(answer, Tensor) else answer
        out = out.index_put((places,), output.flatten(0, 1))
        if lse is not None and sums is not None:
            lse = lse.index_put((places,), sums.transpose(1, 2).flatten(0, 1))
    return out[:total] if lse is None else (out[:total], lse[:total].transpose(0, 1).contiguous())


def _in_one_launch(q: Tensor, queries: Queries, pages: Pages, options: Options) -> Answer:
    """As `packed_over_pages`, by a kernel. Raises `NoKernel` where none serves it."""
    return answered(
        q,
        pages.k,
        pages.v,
        options,
        score_of(options, pages.pad, q.device),
        block_table=pages.table,
        cu_seqlens_q=queries.bounds.to(torch.int32),
        seqused_k=pages.used.to(torch.int32),
        max_seqlen_q=queries.longest,
        strict=True,
    )


def classes(total: int, sequences: int, longest: int) -> list[tuple[int, int, int]]:
    """(shorter, most, room) of each class: at most `room` of so many sequences, of `total` rows in all and none of them
    over `longest`, have more than `shorter` and at most `most` rows. No class takes over `MOST_PADDING` times the rows
    that there are, where one row of each is not more."""
    found, most = [], min(longest, max(1, total))
    allowed = MOST_PADDING * max(1, total)
    while min(sequences, total) * most > allowed:
        shorter = -(-most // MOST_PADDING) - 1
        found.append((shorter, most, total // (shorter + 1)))
        most = shorter
    if found and most > 1:  # where lengths differ, many sequences have one row: they decode
        found.append((1, most, total // 2))
        most = 1
    found.append((0, most, total))
    return [(shorter, most, min(room, sequences)) for shorter, most, room in found if room]
