"""Keys of which only some are in use, and pages: how inputs are made so, and what each sequence then is."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from evoattn.model.append import new_rows
from evoattn.model.block_list import document_of, draw, positions
from evoattn.model.problem import AttentionProblem
from evoattn.model.score import evaluate
from evoattn.model.sequences import starts

NO_PAGE = 0x3FFFFFFF
"""In the table where a sequence has no page: far outside of every cache."""
LEAST, MOST = -(1 << 31), (1 << 31) - 1
"""Of int32."""


def whole_shape(problem: AttentionProblem, tensor: str) -> tuple[int, int, int, int]:
    """`[batch, heads, seqlen, head_dim]` of a tensor, as if K and V were not in pages."""
    return (problem.with_(page=0) if problem.page else problem).shape(tensor)


def make_key_terms(
    problem: AttentionProblem, generator: torch.Generator, device: torch.device | str, extreme: bool
) -> dict[str, torch.Tensor]:
    """`seqused`, `table`, `cu_seqlens_q` and `cu_seqlens_k` of `AttentionProblem.term_shapes`, int32: pages in random
    order, and behind the last key in use `NO_PAGE`, with `extreme` a page that there is.

    `extreme`: a batch of no keys has -1 or `LEAST` in use by turns, one of all keys three more or `MOST`, a last packed
    sequence of no queries or no keys ends before it begins, and all but the last row of the first are nobody's."""
    made: dict[str, torch.Tensor] = {}
    if problem.varlen:
        for name, lengths in zip(("cu_seqlens_q", "cu_seqlens_k"), zip(*problem.sequences, strict=True), strict=True):
            if name in problem.term_shapes:
                made[name] = torch.tensor(starts(lengths), dtype=torch.int32, device=device)
                if extreme and not lengths[-1]:
                    made[name][-1] -= 3
                if extreme:
                    made[name][0] = max(0, lengths[0] - 1)
    if "seqused" in problem.term_shapes:
        below = cycle((-1, LEAST)) if extreme else cycle((0,))
        used = [length or next(below) for length in problem.key_lengths]
        if problem.appended:  # those before the new ones, which the last queries of a short sequence alone have
            used = [length - problem.seqlen_q for length in problem.key_lengths]
        elif extreme:
            past = cycle((problem.seqlen_k + 3, MOST))
            used = [next(past) if length == problem.seqlen_k else length for length in used]
        made["seqused"] = torch.tensor(used, dtype=torch.int32, device=device)
    if problem.page:
        pages = torch.randperm(problem.shape("k")[0], generator=generator, device=device).int()
        table = pages.view(problem.batch, problem.table_pages)
        made["table"] = table.masked_fill(~held(problem, device), 0 if extreme else NO_PAGE)
    return made


def held(problem: AttentionProblem, device: torch.device | str) -> torch.Tensor:
    """Bool `[batch, table_pages]`: pages with keys in use."""
    first_keys = torch.arange(problem.table_pages, device=device) * problem.page
    return first_keys < torch.tensor(problem.key_lengths, device=device)[:, None]


def stored(problem: AttentionProblem, values: torch.Tensor, terms: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """K or V as a kernel finds it: NaN behind the last key in use, in pages if the problem has them. int8, which has no
    NaN, is -128 there.

    `values` is of `whole_shape` and changed in place; the result has the logical shape `problem.shape` of K or V.
    Scales per token, `[batch, kv_heads, seqlen_k, 1]`, are stored likewise."""
    _, kv_heads, _, dim = values.shape
    nothing = math.nan if values.is_floating_point() else torch.iinfo(values.dtype).min
    room = problem.table_pages * problem.page if problem.page else problem.seqlen_k
    if problem.varlen:
        whole = torch.full((problem.batch, kv_heads, room, dim), nothing, dtype=values.dtype, device=values.device)
        for one in each(problem):
            whole[one.number, :, : one.lengths[1]] = values[0, :, one.keys]
    else:
        for row, keys in zip(values, problem.key_lengths, strict=True):
            row[:, keys:] = nothing
        if not problem.page:
            return values
        whole = torch.full((*values.shape[:2], room, dim), nothing, dtype=values.dtype, device=values.device)
        whole[:, :, : problem.seqlen_k] = values
    in_pages = whole.view(problem.batch, kv_heads, problem.table_pages, problem.page, dim).transpose(1, 2)
    cache = torch.full((*problem.shape("k")[:3], dim), nothing, dtype=values.dtype, device=values.device)
    own = held(problem, values.device)
    cache[terms["table"][own].long()] = in_pages[own]
    return cache


def taken_out(problem: AttentionProblem, values: torch.Tensor) -> torch.Tensor:
    """The new rows of K or V, a view of `new_rows`' shape and strides; in `values`, of `whole_shape`, NaN is left where
    they were. New rows that a sequence of fewer keys lacks are 0."""
    shape, strides = new_rows(problem, "k")
    made = torch.zeros(math.prod(shape), dtype=values.dtype, device=values.device).as_strided(shape, strides)
    for row, new, keys in zip(values, made, problem.key_lengths, strict=True):
        count = min(keys, problem.seqlen_q)
        new[:, problem.seqlen_q - count :] = row[:, keys - count : keys]
        row[:, keys - count : keys] = math.nan
    return made


def with_new_keys(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs with caches as a kernel leaves them: copies with the new keys, where the problem has some."""
    made = dict(tensors)
    for name in "kv" if problem.appended else "":
        cache = made[name] = tensors[name].clone()  # strides are kept, as they leave no gap
        for batch, keys in enumerate(problem.key_lengths):
            for position in range(max(0, keys - problem.seqlen_q), keys):
                row = tensors[f"new_{name}"][batch, :, position - keys + problem.seqlen_q]
                if problem.page:
                    page = int(tensors["table"][batch, position // problem.page])
                    cache[page, :, position % problem.page] = row
                else:
                    cache[batch, :, position] = row
    return made


def sequence(
    problem: AttentionProblem, batch: int, others: Mapping[str, torch.Tensor] | None, *tensors: torch.Tensor
) -> tuple[AttentionProblem | None, list[torch.Tensor]]:
    """One batch's keys as a problem of its own length, and its part `[kv_heads, keys, head_dim]` of K and V.

    None for a sequence without keys. Raises `KeyError` where `others` lacks the table."""
    if not problem.seqused:
        return problem, [tensor[batch] for tensor in tensors]
    keys = problem.key_lengths[batch]
    if problem.page:
        pages = (others or {})["table"][batch, : -(-keys // problem.page)].long()
        parts = [tensor[pages].transpose(0, 1).flatten(1, 2)[:, :keys] for tensor in tensors]
    else:
        parts = [tensor[batch, :, :keys] for tensor in tensors]
    return problem.with_(seqlen_k=keys, seqused="", page=0, appended=False) if keys else None, parts


def gathered(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs with K and V of `whole_shape`, copies with zeros behind the last key in use: what a peer that knows no
    lengths can multiply by 0. The same inputs where all keys are in use."""
    tensors = with_new_keys(problem, tensors)
    if problem.varlen and problem.page:
        parts = (out_of_pages(problem, tensors, tensors[name]) for name in problem.tensors[1:])
        return {**tensors, **dict(zip(problem.tensors[1:], parts, strict=True))}
    if not problem.seqused:
        return dict(tensors)
    made = dict(tensors)
    for name in problem.tensors[1:]:
        whole = torch.zeros(whole_shape(problem, name), dtype=tensors[name].dtype, device=tensors[name].device)
        for batch, keys in enumerate(problem.key_lengths):
            _, (part,) = sequence(problem, batch, tensors, tensors[name])
            whole[batch, :, :keys] = part
        made[name] = whole
    return made


def out_of_pages(
    problem: AttentionProblem, others: Mapping[str, torch.Tensor] | None, tensor: torch.Tensor
) -> torch.Tensor:
    """K or V of packed sequences, end to end as if they were not in pages."""
    parts = []
    for table, keys in zip((others or {})["table"], problem.key_lengths, strict=True):
        pages = table[: -(-keys // problem.page)].long()
        parts.append(tensor[pages].transpose(0, 1).flatten(1, 2)[:, :keys])
    return torch.cat(parts, dim=1)[None]


@dataclass(frozen=True)
class One:
    """One sequence, or for a dense batch all of them."""

    queries: slice
    """Rows of Q and O."""
    keys: slice
    """Rows of K and V."""
    number: int = 0

    @property
    def lengths(self) -> tuple[int, int]:
        """(queries, keys)."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    def alone(self, problem: AttentionProblem) -> AttentionProblem:
        """The dense problem of this sequence, which has queries and keys."""
        seqlen_q, seqlen_k = self.lengths
        return problem.with_(batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, varlen="")

    def inputs(self, others: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """The inputs beside q, k and v of `alone`, with its number `b` among the packed ones."""
        return {**(others or {}), "b": torch.tensor(self.number)}


def each(problem: AttentionProblem, others: Mapping[str, torch.Tensor] | None = None) -> Iterator[One]:
    """The sequences in their order; of a dense batch one that is all of each. With the inputs `others`, of the first
    packed one what is behind the rows of nobody."""
    if not problem.varlen:
        yield One(slice(0, problem.seqlen_q), slice(0, problem.seqlen_k))
        return
    ends = (starts(lengths)[1:] for lengths in zip(*problem.sequences, strict=True))
    fronts = (rows_of_nobody(others, name) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    queries, keys = ((front, *of) for front, of in zip(fronts, ends))
    for i in range(problem.batch):
        yield One(slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1]), i)


def rows_of_nobody(others: Mapping[str, torch.Tensor] | None, name: str) -> int:
    """Where the first packed sequence begins, by these inputs; 0 without them."""
    return int(others[name][0]) if others and name in others else 0


def with_pairs(problem: AttentionProblem, others: Mapping[str, torch.Tensor] | None) -> Iterator[One]:
    """Those that have both queries and keys."""
    return (one for one in each(problem, others) if all(one.lengths))


NO_BLOCK = 0x3FFFFFFF
"""Behind the last block that a list names: far outside of all keys."""


def make_block_terms(problem: AttentionProblem, device: torch.device | str) -> dict[str, torch.Tensor]:
    """The inputs of `BlockMask.shapes`, empty without a block list."""
    if not problem.blocks:
        return {}
    mask, batch, _, band, diagonal = problem.block_mask
    lists, made = draw(*problem.block_mask), {}
    for name, kind in (("", "partial"), ("full_", "full")):
        rows = [[[getattr(row, kind) for row in of_head] for of_head in of_batch] for of_batch in lists]
        blocks = mask.blocks(band)[1]
        counts = [[[len(row) for row in of_head] for of_head in of_batch] for of_batch in rows]
        indices = [
            [[[*row, *[NO_BLOCK] * (blocks - len(row))] for row in of_head] for of_head in of_batch]
            for of_batch in rows
        ]
        made[f"{name}kv_num_blocks"] = torch.tensor(counts, dtype=torch.int32, device=device)
        made[f"{name}kv_indices"] = torch.tensor(indices, dtype=torch.int32, device=device)
    of = {"query_documents": positions(band, diagonal), "key_documents": range(band.seqlen_k)}
    for name, (batches, _) in mask.document_shapes(batch, band).items():
        starts = [mask.starts(b, max(band.seqlen_k, of[name].stop)) for b in range(batches)]
        documents = [[document_of(of_batch, place) for place in of[name]] for of_batch in starts]
        made[name] = torch.tensor(documents, dtype=torch.int32, device=device)
    return made


def visible(problem: AttentionProblem, given: Mapping[str, Any], batch: int, heads: slice, rows: slice) -> torch.Tensor:
    """Bool `[heads or 1, rows, seqlen_k]` of a batch: keys in a FULL block, or in a PARTIAL one where the predicate
    shows them. The lists decide, whatever the text says."""
    mask, _, _, band, _ = problem.block_mask
    device = given["kv_indices"].device
    queries = torch.arange(rows.start, rows.stop, device=device)[:, None]
    keys = torch.arange(band.seqlen_k, device=device)
    named = (_named(given[f"{n}kv_num_blocks"], given[f"{n}kv_indices"], batch, heads) for n in ("full_", ""))
    full, partial = (blocks[:, queries // mask.rows, keys // mask.keys] for blocks in named)
    shown = band.sees(queries, keys)
    if problem.shown is not None:
        indices = {"b": batch, "q": queries, "k": keys, "d": problem.diagonal}
        indices["h"] = torch.arange(problem.heads, device=device)[heads, None, None]
        shown = shown & evaluate(problem.shown, {**given, **indices}, torch)
    seen: torch.Tensor = full | (partial & shown)
    return seen


def _of_batch(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    return tensor[min(batch, tensor.shape[0] - 1)]


def _named(counts: torch.Tensor, indices: torch.Tensor, batch: int, heads: slice) -> torch.Tensor:
    """Bool `[heads or 1, blocks of rows, blocks of keys]`: which blocks the lists of a batch name."""
    counts, indices = (_of_batch(tensor, batch) for tensor in (counts, indices))
    if counts.shape[0] > 1:
        counts, indices = counts[heads], indices[heads]
    blocks = indices.shape[-1]
    listed = torch.arange(blocks, device=counts.device) < counts[..., None]
    named = torch.zeros((*counts.shape, blocks + 1), dtype=torch.bool, device=counts.device)
    return named.scatter_(-1, indices.masked_fill(~listed, blocks).long(), True)[..., :blocks]
