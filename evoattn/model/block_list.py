"""A block list as a mask: which blocks of keys a block of rows sees, as `BlockMask` of torch's FlexAttention has it.

Rows and keys are cut into blocks. For each block of rows one list names its FULL blocks of keys, all of which its rows
see, and another its PARTIAL ones, in which a predicate decides. A block in neither list is hidden. The predicate: query
and key are of the same document, the problem's mask shows the key, and so does its own `predicate`.

A text says how large blocks are and what documents there are, `128x128:300+700`: documents of 300 and 700 keys by
turns, up to the last key. A query has the document of the key on its diagonal. `b`, `h` or `bh` in front, as in
`bh:128x128:300+700`, gives each batch documents and lists of its own, and each head lists. Without `mixed` behind
(`128x128:300+700:mixed`) the lists are what documents and mask alone would give. With it they are not: blocks are
hidden that these show, and shown that they hide, in no order. With `mixed2` there is also room for bits of 2 blocks of
a list alone. Both are for checks.

`128x128:1/7/16` has no documents but counts: a block of rows sees 1 PARTIAL and 7 FULL blocks in the mean, and 16 at
most. So a caller's lists are written, which only the device knows."""

import math
import random
import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import cycle
from typing import Any

from evoattn.model.mask import Band

_TEXT = re.compile(
    r"(?:(bh?|h):)?(\d{1,5})x(\d{1,5}):(?:(\d{1,9}(?:\+\d{1,9})*)|(\d{1,7}(?:/\d{1,7}){2}))(:mixed(\d?))?", re.ASCII
)
NOT_BESIDE = ("window", "seqused", "page", "varlen", "kv")
"""Variants with which there is no block list."""


@dataclass(frozen=True)
class BlockRow:
    """The blocks of keys that one block of rows sees, by their numbers."""

    partial: tuple[int, ...]
    full: tuple[int, ...]


Lists = tuple[tuple[tuple[BlockRow, ...], ...], ...]
"""By batch (or one for all), head (or one for all) and block of rows."""


@dataclass(frozen=True)
class BlockMask:
    """What a text says."""

    rows: int
    """Queries of a block."""
    keys: int
    """Keys of a block."""
    documents: tuple[int, ...]
    """Keys of each, by turns; none where there are `counts`."""
    counts: tuple[int, int, int]
    """Blocks that a block of rows sees: PARTIAL and FULL ones in the mean, and the most of both."""
    by_batch: bool
    by_head: bool
    mixed: bool
    room: int
    """Blocks of a list of which bits are kept, at most; 0: as many as memory allows."""

    def starts(self, batch: int, positions: int) -> list[int]:
        """The first keys of a batch's documents up to that position. Batches that differ begin with different ones."""
        if not self.documents:
            return [0]
        turn = batch % len(self.documents) if self.by_batch else 0
        found = [0]
        for length in cycle(self.documents[turn:] + self.documents[:turn]):
            if found[-1] + length >= positions:
                return found
            found.append(found[-1] + length)
        raise AssertionError("a cycle does not end")

    def blocks(self, band: Band) -> tuple[int, int]:
        """Blocks of rows and of keys that there are."""
        return math.ceil(band.seqlen_q / self.rows), math.ceil(band.seqlen_k / self.keys)

    def shapes(self, batch: int, heads: int, band: Band) -> dict[str, tuple[int, ...]]:
        """Those of the inputs, all int32: lists by FlexAttention's names, then `document_shapes`."""
        batches = batch if self.by_batch else 1
        rows, keys = self.blocks(band)
        counts = (batches, heads if self.by_head else 1, rows)
        return {
            "kv_num_blocks": counts,
            "kv_indices": (*counts, keys),
            "full_kv_num_blocks": counts,
            "full_kv_indices": (*counts, keys),
            **self.document_shapes(batch, band),
        }

    def document_shapes(self, batch: int, band: Band) -> dict[str, tuple[int, int]]:
        """Of the documents of queries and keys; empty where there are none."""
        batches = batch if self.by_batch else 1
        both = {"query_documents": (batches, band.seqlen_q), "key_documents": (batches, band.seqlen_k)}
        return both if self.documents else {}


@cache
def parse_blocks(text: str) -> BlockMask:
    """Raises `ValueError` on anything that is no text of blocks."""
    if match := _TEXT.fullmatch(text):
        dims, rows, keys, documents, counted, mixed, room = match.groups(default="")
        lengths = tuple(map(int, documents.split("+"))) if documents else ()
        partial, full, most = map(int, counted.split("/")) if counted else (0, 0, 0)
        if int(rows) and int(keys) and all(lengths) and partial + full <= most + bool(lengths):
            counts = partial, full, most
            by = "b" in dims, "h" in dims
            return BlockMask(int(rows), int(keys), lengths, counts, *by, bool(mixed), int(room or 0))
    raise ValueError(f"{text!r} is no list of blocks.")


def fault_of_blocks(text: Any, others: tuple[str, ...]) -> str:
    """One sentence if a text, beside the variants `others`, cannot be, else empty."""
    if not text:
        return ""
    try:
        parse_blocks(text)
    except (TypeError, ValueError):
        return (
            f"blocks must be the rows and keys of a block and lengths of documents, e.g. 128x128:300+700, or blocks in "
            f"the mean and at most, e.g. 128x128:1/7/16, not {text!r}."
        )
    if beside := [name for name in others if name in NOT_BESIDE]:
        return f"blocks and {beside[0]} exclude each other: a block list has no such keys; take one of them out."
    return ""


def positions(band: Band, diagonal: int) -> range:
    """The key whose document each query has: that on the diagonal from key `diagonal` of query 0. Those before key 0
    count as it."""
    return range(diagonal, diagonal + band.seqlen_q)


def document_of(starts: list[int], position: int) -> int:
    """The number of the document of a key."""
    return bisect_right(starts, max(0, position)) - 1


@lru_cache(maxsize=64)
def draw(mask: BlockMask, batch: int, heads: int, band: Band, diagonal: int) -> Lists:
    """The lists of so many batches and heads, always the same."""
    made = []
    for b in range(batch if mask.by_batch else 1):
        honest = (
            _counted(mask, band, b)
            if not mask.documents
            else _honest(mask, mask.starts(b, max(band.seqlen_k, diagonal + band.seqlen_q)), band, diagonal)
        )
        lists = heads if mask.by_head else 1
        made.append(tuple(_mixed(honest, mask, band, b, h) if mask.mixed else honest for h in range(lists)))
    return tuple(made)


def _honest(mask: BlockMask, starts: list[int], band: Band, diagonal: int) -> tuple[BlockRow, ...]:
    """The list that the predicate alone gives."""
    rows = []
    for row in range(mask.blocks(band)[0]):
        partial, full = [], []
        for block in range(mask.blocks(band)[1]):
            seen = _pairs(mask, starts, band, diagonal, row, block)
            if seen == _size(mask, band, row, block):
                full.append(block)
            elif seen:
                partial.append(block)
        rows.append(BlockRow(tuple(partial), tuple(full)))
    return tuple(rows)


def _counted(mask: BlockMask, band: Band, batch: int) -> tuple[BlockRow, ...]:
    """Lists of so many blocks, from the first of these rows to the last more and more."""
    rows, blocks = mask.blocks(band)
    partial, full, most = mask.counts
    chance, made = random.Random(f"{batch}, {rows}, {blocks}"), []
    for row in range(rows):
        place = (row + 0.5) / rows  # from 0 to 1, 1/2 in the mean
        count = min(blocks, round(max(0.0, partial + full + (most - partial - full) * (2 * place - 1))))
        seen = sorted(chance.sample(range(blocks), count))
        few = round(count * partial / max(1, partial + full))
        made.append(BlockRow(tuple(seen[count - few :]), tuple(seen[: count - few])))
    return tuple(made)


def _mixed(rows: tuple[BlockRow, ...], mask: BlockMask, band: Band, batch: int, head: int) -> tuple[BlockRow, ...]:
    """The same with half of the blocks anything, in no order, some rows with one kind of blocks alone, or none. The
    first row of all, and of each list that all heads share, has both kinds where there are two blocks: by turns its
    PARTIAL ones show nothing, so that the first key that it sees is in the FULL one. The third row of each list, and
    the last where it comes later, has all blocks, every other one PARTIAL, and so has the first without such blocks.
    From the ninth on rows have few; a warp that looks at 32 together goes on behind none, and behind some, by heads."""
    blocks = mask.blocks(band)[1]
    chance, made = random.Random(f"{batch}, {head}, {blocks}"), []
    for number, row in enumerate(rows):
        partial, full = set(row.partial), set(row.full)
        first = number == head == 0 and not (batch and mask.by_head)
        everything = number == 2 or number == len(rows) - 1 > 2 or (number % 32 == 31 and head % 2 == 1)
        hidden = set(range(1, blocks)) - partial - full
        for block in range(blocks):
            if chance.random() < 0.5:
                partial -= {block}
                full -= {block}
                chance.choice((partial, full, set[int]())).add(block)
        kinds = "both", "both", "both", "partial", "full", "none"
        kind = "none" if number % 32 == 31 else chance.choice(kinds if number < 8 else kinds[-3:])
        kind = "both" if first or everything else kind
        if first and hidden and (len(rows) + blocks) % 2:
            partial, full = set(sorted(hidden)[-3:]), {0}
        elif (first and blocks > 1) or everything:
            start = 0 if first else 1 if blocks == 1 else (blocks + batch + head) % 2
            full, partial = set(range(start, blocks, 2)), set(range(1 - start, blocks, 2))
        kept = {"both": (partial, full), "partial": (partial, set()), "full": (set(), full), "none": (set(), set())}
        seen = [sorted(numbers) for numbers in kept[kind]]
        for numbers in seen:
            chance.shuffle(numbers)
        made.append(BlockRow(*map(tuple, seen)))
    return tuple(made)


def _size(mask: BlockMask, band: Band, row: int, block: int) -> int:
    """Pairs of a query and a key that there are in a block."""
    return min(mask.rows, band.seqlen_q - row * mask.rows) * min(mask.keys, band.seqlen_k - block * mask.keys)


def _pairs(mask: BlockMask, starts: list[int], band: Band, diagonal: int, row: int, block: int) -> int:
    """Pairs of a block that the predicate shows."""
    first, last = row * mask.rows, min(band.seqlen_q, (row + 1) * mask.rows)
    begin, end = block * mask.keys, min(band.seqlen_k, (block + 1) * mask.keys)
    documents = range(
        max(document_of(starts, first + diagonal), document_of(starts, begin)),
        min(document_of(starts, last - 1 + diagonal), document_of(starts, end - 1)) + 1,
    )
    total = 0
    for document in documents:
        start = starts[document]
        stop = starts[document + 1] if document + 1 < len(starts) else math.inf
        top = max(first, start - diagonal) if document else first
        bottom, left, right = min(last, stop - diagonal), max(begin, start), min(end, stop)
        if bottom > top and right > left:
            highest = None if band.highest is None else band.highest + top - left
            total += Band(int(bottom) - top, int(right) - left, None, highest).pairs  # no window is beside lists
    return total


@lru_cache(maxsize=64)
def visible_pairs(mask: BlockMask, batch: int, heads: int, band: Band, diagonal: int) -> int:
    """Pairs of a query and a key that are seen, over all batches and heads. Of counted blocks about so many: of PARTIAL
    ones half."""
    if not mask.documents:
        partial, full, _ = mask.counts
        keys = min(band.seqlen_k, (full + partial / 2) * mask.keys)
        return round(batch * heads * band.seqlen_q * keys)
    lists, total = draw(mask, batch, heads, band, diagonal), 0
    for b, of_batch in enumerate(lists):
        starts = mask.starts(b, max(band.seqlen_k, diagonal + band.seqlen_q))
        for rows in of_batch:
            for number, row in enumerate(rows):
                total += sum(_size(mask, band, number, block) for block in row.full)
                total += sum(_pairs(mask, starts, band, diagonal, number, block) for block in row.partial)
    return total * (batch // len(lists)) * (heads // len(lists[0]))


@lru_cache(maxsize=64)
def keys_read(mask: BlockMask, batch: int, heads: int, kv_heads: int, band: Band, diagonal: int) -> int:
    """Keys in blocks that some list names, over all batches and K/V heads; of counted blocks as many as lists name, up
    to all keys."""
    group = heads // kv_heads
    if not mask.documents:
        partial, full, _ = mask.counts
        most = mask.blocks(band)[0] * (group if mask.by_head else 1) * (partial + full) * mask.keys
        return batch * kv_heads * min(band.seqlen_k, most)
    lists, total = draw(mask, batch, heads, band, diagonal), 0
    for of_batch in lists:
        for kv_head in range(kv_heads):
            seen = of_batch[kv_head * group : (kv_head + 1) * group] if mask.by_head else of_batch
            named = {block for rows in seen for row in rows for block in (*row.partial, *row.full)}
            total += sum(min(mask.keys, band.seqlen_k - block * mask.keys) for block in named)
    return total * (batch // len(lists))


@lru_cache(maxsize=64)
def blocks_of_rows(mask: BlockMask, batch: int, heads: int, band: Band, diagonal: int) -> tuple[float, int]:
    """(mean, most) blocks of keys that a block of rows visits."""
    if not mask.documents:
        return float(sum(mask.counts[:2])), mask.counts[2]
    lists = draw(mask, batch, heads, band, diagonal)
    counts = [len(row.partial) + len(row.full) for of_batch in lists for rows in of_batch for row in rows]
    return sum(counts) / len(counts), max(counts)


@lru_cache(maxsize=64)
def partial_share(mask: BlockMask, batch: int, heads: int, band: Band, diagonal: int) -> float:
    """Of the blocks that the lists name, those that are PARTIAL."""
    partial, full, _ = mask.counts
    if mask.documents:
        rows = [row for of_batch in draw(mask, batch, heads, band, diagonal) for of_head in of_batch for row in of_head]
        partial, full = (sum(len(getattr(row, kind)) for row in rows) for kind in ("partial", "full"))
    return partial / max(1, partial + full)
