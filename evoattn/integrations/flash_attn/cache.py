"""Caches of keys and values, plain or of pages: where a key lies, how new keys are written, and attention over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from evoattn.integrations.flash_attn import by_torch
from evoattn.integrations.flash_attn.columns import lie_side_by_side, side_by_side
from evoattn.integrations.flash_attn.options import Options, answered, score_of, wants_gradients
from evoattn.integrations.flash_attn.sequences import Keys, Pages, Queries, over_pages, over_rows, packed_over_pages
from evoattn.model.variant import PAGES, SMALL_PAGE
from evoattn.ops.beside import appended_to
from evoattn.ops.call import Answer
from evoattn.ops.given import call_of


@dataclass(frozen=True)
class Cache:
    """K and V `[rows of the cache, length, kv_heads, head_dim]`, or pages `[pages, page, kv_heads, head_dim]`."""

    k: Tensor
    v: Tensor
    batch: int
    """Sequences."""
    used: Tensor | None = None
    """`[batch]`: keys of each, those in front of `pad` among them; None for all that there is room for."""
    table: Tensor | None = None
    """`[batch, most pages]`: the pages of each sequence."""
    row: Tensor | None = None
    """`[batch]`: the row of the cache that each sequence has; None for its own number."""
    pad: Tensor | None = None
    """`[batch]`: the first key of each."""

    @property
    def room(self) -> int:
        """The most keys that a sequence can have."""
        return self.k.shape[1] * (1 if self.table is None else self.table.shape[1])

    @property
    def lengths(self) -> Tensor:
        """`used`, or the room."""
        if self.used is None:
            return torch.full((self.batch,), self.room, dtype=torch.int32, device=self.k.device)
        return self.used

    @property
    def rows(self) -> Tensor:
        """`row`, or the numbers themselves."""
        return torch.arange(self.batch, device=self.k.device) if self.row is None else self.row.long()

    def place(self, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Where keys lie: indices into the first two dimensions of `k` and `v`; positions are within the room."""
        if self.table is None:
            return self.rows[sequence], position
        page = torch.div(position, self.k.shape[1], rounding_mode="floor")
        return self.table[sequence, page].long(), position % self.k.shape[1]

    def append(self, k: Tensor, v: Tensor, sequence: Tensor, position: Tensor) -> None:
        """Write rows `[rows, kv_heads, head_dim]` at these positions of these sequences, which there are. What has no
        place is not written: a position behind the room, a page that the table does not name."""
        within = position < self.room
        at, offset = self.place(sequence, position.clamp(0, self.room - 1))
        if self.table is not None:
            within = within & (at >= 0) & (at < self.k.shape[0])
        write_rows((self.k, self.v), (k, v), at, offset, within)

    def joined(self) -> Cache:
        """The cache whose keys are `[v, k]`, for queries `[qv, q]`: a view where the two lie side by side, as in a
        latent cache; as they are where kernels read both out of pages; else a copy."""
        cache = self if self.table is None else self.in_served_pages()
        in_pages = cache.table is not None and cache.k.shape[-1] <= cache.v.shape[-1]
        if in_pages and not lie_side_by_side(cache.v, cache.k):
            return cache
        both = side_by_side(cache.v, cache.k)
        return replace(cache, k=both, v=both[..., : cache.v.shape[-1]])

    def in_served_pages(self) -> Cache:
        """The cache in pages that kernels take: views of the pages it has where these are whole multiples, else a plain
        cache of copied keys."""
        assert self.table is not None
        page = self.k.shape[1]
        if page in PAGES:
            return self
        part = next(size for size in reversed(PAGES) if page % size == 0)
        if all(tensor.stride(0) == page * tensor.stride(1) for tensor in (self.k, self.v)):
            parts = page // part
            k, v = (tensor.unflatten(1, (parts, part)).flatten(0, 1) for tensor in (self.k, self.v))
            table = self.table[..., None] * parts + torch.arange(parts, device=self.table.device)
            return replace(self, k=k, v=v, table=table.flatten(1).to(torch.int32))
        where = self.table.long().clamp(0, self.k.shape[0] - 1)
        return replace(self, k=self.k[where].flatten(1, 2), v=self.v[where].flatten(1, 2), table=None, row=None)

    def as_pages(self) -> Cache | None:
        """A plain cache as pages, of which each sequence has those of its row; None where rows are no whole pages."""
        length = self.k.shape[1]
        part = next((size for size in reversed(PAGES) if length % size == 0), 0)
        if part < SMALL_PAGE or any(tensor.stride(0) != length * tensor.stride(1) for tensor in (self.k, self.v)):
            return None
        k, v = (tensor.unflatten(1, (length // part, part)).flatten(0, 1) for tensor in (self.k, self.v))
        table = self.rows[:, None] * (length // part) + torch.arange(length // part, device=self.k.device)
        return replace(self, k=k, v=v, table=table.to(torch.int32), row=None)


def write_rows(
    caches: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], at: Tensor, offset: Tensor, within: Tensor
) -> None:
    """Write rows `[rows, kv_heads, head_dim]` of K and V to `[at, offset]` of their caches, but those that are not
    `within`.

    An index out of range on a GPU would end the process. Such a row writes what another one writes, to the same place:
    a copy of the rows that have one would need their number on the host."""
    if not len(at):
        return
    source = torch.where(within, torch.arange(len(at), device=at.device), within.to(torch.int8).argmax())
    at, offset = at[source].clamp(0, caches[0].shape[0] - 1), offset[source]
    has_place = within[source][:, None, None]  # all rows, or none
    for cache, new in zip(caches, rows, strict=True):
        cache.index_put_((at, offset), torch.where(has_place, new[source].to(cache.dtype), cache[at, offset]))


def attend(q: Tensor, cache: Cache, options: Options) -> Answer:
    """Attention of queries `[batch, rows, heads, head_dim]`, whose last one stands at each sequence's last key."""
    if cache.table is not None:
        cache = cache.in_served_pages()
    if cache.row is not None and cache.pad is None:
        cache = cache.as_pages() or cache
    if cache.table is not None:
        return over_pages(q, Pages(cache.k, cache.v, cache.table, cache.lengths, cache.pad), options)
    if cache.row is None and cache.pad is None:
        return of_batch(q, cache.k, cache.v, options, cache.used)
    bounds = torch.arange(cache.batch + 1, dtype=torch.int32, device=q.device) * q.shape[1]
    answer = attend_packed(q.flatten(0, 1), Queries(bounds, q.shape[1]), cache, options)
    output, lse = (answer, None) if isinstance(answer, Tensor) else answer
    output = output.unflatten(0, (cache.batch, q.shape[1]))
    return output if lse is None else (output, lse.unflatten(1, (cache.batch, q.shape[1])).transpose(0, 1))


def append_and_attend(q: Tensor, new: tuple[Tensor, Tensor], cache: Cache, options: Options) -> Answer | None:
    """`attend` after new keys and values `[batch, rows, kv_heads, head_dim]` were written behind those in use, in one
    launch; None where that takes two, or more."""
    in_pages = cache.table is not None
    if cache.used is None or cache.row is not None or cache.pad is not None or cache.used.dtype != torch.int32:
        return None
    if (in_pages and cache.k.shape[1] not in PAGES) or score_of(options, None, q.device) is not None:
        return None
    query, key, value = (one if in_pages else one.transpose(1, 2) for one in (q, cache.k, cache.v))
    call = call_of(query, key, value, {**options.words, "block_table": cache.table, "seqused_k": cache.used})
    if call.why_not_terms() or any(one.dim() != 4 for one in (q, *new)):
        return None
    answer = appended_to(call, new)
    if answer is None or in_pages:
        return answer
    return answer.transpose(1, 2) if isinstance(answer, Tensor) else (answer[0].transpose(1, 2), answer[1])


def attend_packed(q: Tensor, queries: Queries, cache: Cache, options: Options) -> Answer:
    """The same of packed queries `[total_q, heads, head_dim]`."""
    if cache.table is not None:
        cache = cache.in_served_pages()
    if cache.table is not None:
        pages = Pages(cache.k, cache.v, cache.table, cache.lengths, cache.pad)
        return packed_over_pages(q, queries, pages, options)
    if cache.row is not None and any(one is not None and one.dim() == 2 for one in (options.k_scale, options.v_scale)):
        # Scales are of sequences, of which several may have one row, or rows in another order.
        k, v = (one.view(torch.uint8)[cache.rows].view(one.dtype) for one in (cache.k, cache.v))
        cache = replace(cache, k=k, v=v, row=None)
    first = torch.zeros_like(cache.rows) if cache.pad is None else cache.pad
    lengths = cache.lengths.clamp(max=cache.room) - first
    keys = Keys(cache.rows * cache.room + first, cache.room, lengths)
    return over_rows(q, cache.k.flatten(0, 1), cache.v.flatten(0, 1), queries, keys, options)


def attend_engine(q: Tensor, queries: Queries, cache: Cache, options: Options) -> Answer:
    """`attend_packed` as serving engines ask for it: where all sequences have as many queries, as in a step of
    decoding, a kernel for that runs, of which some come ready chosen."""
    if q.shape[0] != cache.batch * queries.longest or queries.uniform is False or not q.shape[0]:
        return attend_packed(q, queries, cache, options)
    answer = attend(q.unflatten(0, (cache.batch, queries.longest)), cache, options)
    if isinstance(answer, Tensor):
        return answer.flatten(0, 1)
    return answer[0].flatten(0, 1), answer[1].transpose(0, 1).flatten(1)


def of_batch(q: Tensor, k: Tensor, v: Tensor, options: Options, used: Tensor | None = None) -> Answer:
    """Attention of `[batch, rows, heads, head_dim]`; `used` `[batch]` says how many keys there are."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if options.dropout_p:
        return by_torch.of_batch(query, key, value, options, used).transpose(1, 2)
    if k.shape[1] == 1 and used is None and wants_gradients(q, k, v):
        # A softmax over one key passes no gradient on. Torch's fused kernels make one of rounding errors, its formula,
        # which answers for keys in use where the log-sum-exp is wanted, makes none.
        given = torch.ones(len(k), dtype=torch.int32, device=k.device)
        output, lse = of_batch(q, k, v, replace(options, return_lse=True), given)
        return (output, lse) if options.return_lse else output
    answer = answered(query, key, value, options, score_of(options, None, q.device), seqused_k=used)
    return answer.transpose(1, 2) if isinstance(answer, Tensor) else (answer[0].transpose(1, 2), answer[1])
