"""A `BlockMask` of torch's FlexAttention as kernels take it: its lists where tiles are parts of its blocks, else a
table of what each block is. The lists say what is seen, also where `mask_mod` says more.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from evoattn.model.mask import Band
from evoattn.ops.torch_answer import EMPTY, FULL, PARTIAL, states_of

LARGEST_BLOCK = 4096
"""Rows or keys: tiles past the last key of a block are looked at."""
LEAST_BLOCK = 16
"""No tile is smaller."""
TABLE = "blocks"
"""The name of the table of what each block is."""
WHOLE = 1 << 30
"""Rows and keys of the one block of the mask that torch makes where none is given."""
UNREAD, LIKELY_BLOCKS = "?", 16
"""In place of the counts of a mask that only a compiled graph has seen; blocks of which some would be seen by rows."""


@dataclass
class Kept:
    """What was found out of a mask, once. `parts` are the tensors that it was found out of."""

    parts: tuple[Any, ...]
    counts: str
    """See `evoattn.model.block_list`."""
    no_full: tuple[Tensor, Tensor] | None
    """Lists without an entry, for a mask that has none of FULL blocks."""
    agrees: dict[Band, bool]
    """Whether it shows just what a band shows."""


_kept: weakref.WeakKeyDictionary[BlockMask, Kept] = weakref.WeakKeyDictionary()


def why_not(mask: BlockMask, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> str:
    """One reason, without a full stop, why a mask is none of such a call; empty where it is."""
    if not isinstance(mask, BlockMask):
        return "block_mask is no BlockMask"
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        return "block_mask is a slice of another"
    counts, indices = mask.kv_num_blocks, mask.kv_indices
    (rows, keys), blocks = mask.BLOCK_SIZE, -(-seqlen_q // mask.BLOCK_SIZE[0])
    if tuple(mask.seq_lengths) != (seqlen_q, seqlen_k):
        return f"block_mask is of {mask.seq_lengths[0]} queries and {mask.seq_lengths[1]} keys"
    sizes = tuple(counts.shape)
    if counts.dim() != 3 or sizes[0] not in (1, batch) or sizes[1] not in (1, heads) or sizes[2] != blocks:
        return f"block_mask has lists of shape {list(sizes)}"
    if tuple(indices.shape[:3]) != sizes or min(rows, keys) < 1:
        return f"block_mask has lists of shape {list(indices.shape)}"
    for lists in (mask.full_kv_num_blocks, mask.full_kv_indices):
        if lists is not None and tuple(lists.shape[:3]) != sizes:
            return f"block_mask has FULL lists of shape {list(lists.shape)}"
    return ""


def _parts(mask: BlockMask) -> tuple[Any, ...]:
    return mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices, mask.BLOCK_SIZE


def is_kept(mask: BlockMask) -> bool:
    """Whether the mask is known as it is."""
    found = _kept.get(mask)
    return found is not None and all(one is other for one, other in zip(found.parts, _parts(mask), strict=True))


def kept(mask: BlockMask) -> Kept:
    """What is known of a mask that fits; its first call waits for the device."""
    if is_kept(mask):
        return _kept[mask]
    full = mask.kv_num_blocks * 0 if mask.full_kv_num_blocks is None else mask.full_kv_num_blocks
    found = _kept[mask] = Kept(_parts(mask), _counts(mask.kv_num_blocks, full), none_full(mask), {})
    return found


def none_full(mask: BlockMask) -> tuple[Tensor, Tensor] | None:
    """Lists without an entry, for a mask that has none of FULL blocks; None for others."""
    if mask.full_kv_num_blocks is not None:
        return None
    return torch.zeros_like(mask.kv_num_blocks, dtype=torch.int32), torch.zeros_like(mask.kv_indices)


def _counts(partial_blocks: Tensor, full_blocks: Tensor) -> str:
    """`Kept.counts` of the numbers of PARTIAL and FULL blocks; waits for the device."""
    both = partial_blocks + full_blocks
    each = torch.stack((partial_blocks.double().mean(), full_blocks.double().mean(), both.max()))
    partial, whole, most = (_rounded(count) for count in each.tolist())
    return f"{partial}/{whole}/{max(most, partial + whole)}"


def likely(text: str, blocks: int) -> str:
    """The text of an unread mask with counts that a mask of so many blocks of keys may have."""
    few = max(1, min(blocks, LIKELY_BLOCKS) // 2)
    return text.replace(UNREAD, f"{few}/{few}/{2 * few}")


_read: dict[tuple[Any, ...], str] = {}
"""Texts of masks that were unread."""
MOST_READ = 1024


def told(text: str, lists: tuple[Tensor | None, ...]) -> str:
    """The text of an unread mask with the counts of the first mask like it, of the same sizes: they matter for the
    choice of a kernel alone, and are read from the device once. A graph that is being captured reads none."""
    counts, indices, full, _ = lists
    assert counts is not None and indices is not None and full is not None
    key = text, indices.shape, indices.device
    if (found := _read.get(key)) is None:
        if counts.is_cuda and torch.cuda.is_current_stream_capturing():
            return likely(text, indices.shape[-1])
        if len(_read) >= MOST_READ:
            _read.clear()
        found = _read[key] = text.replace(UNREAD, _counts(counts, full))
    return found


def _rounded(count: float) -> int:
    """Up to a number of two significant bits, so that masks that differ little have one plan."""
    whole = -int(-count // 1)
    step = 1 << max(0, whole.bit_length() - 2)
    return -(-whole // step) * step


def text_of(mask: BlockMask, known: Kept) -> str:
    """As `AttentionProblem.blocks`; empty where kernels have no such blocks."""
    rows, keys = mask.BLOCK_SIZE
    if not all(LEAST_BLOCK <= size <= LARGEST_BLOCK and size % LEAST_BLOCK == 0 for size in (rows, keys)):
        return ""
    by = "b" * (mask.kv_num_blocks.shape[0] > 1) + "h" * (mask.kv_num_blocks.shape[1] > 1)
    return f"{by}{':' * bool(by)}{rows}x{keys}:{known.counts}"


def lists_of(mask: BlockMask, known: Kept, seqlen_k: int) -> tuple[Tensor, ...]:
    """The four lists as kernels read them."""
    columns = -(-seqlen_k // mask.BLOCK_SIZE[1])
    full = known.no_full or (mask.full_kv_num_blocks, mask.full_kv_indices)
    made: list[Tensor] = []
    for counts, indices in ((mask.kv_num_blocks, mask.kv_indices), full):
        assert counts is not None and indices is not None
        width = indices.shape[-1]
        if width < columns:
            indices = torch.nn.functional.pad(indices, (0, columns - width))
        made += [one.to(torch.int32).contiguous() for one in (counts, indices[..., :columns])]
    return tuple(made)


def table_of(mask: BlockMask, seqlen_k: int) -> Tensor:
    """What each block is, int32 `[batch or 1, heads or 1, blocks of rows, blocks of keys]`."""
    columns = -(-seqlen_k // mask.BLOCK_SIZE[1])
    full = mask.full_kv_num_blocks, mask.full_kv_indices
    return states_of(((mask.kv_num_blocks, mask.kv_indices), full), columns)


def expression_of(mask: BlockMask, score: str, predicate: str) -> str:
    """The score with what blocks and predicate hide at -inf, of a table `TABLE`."""
    rows, keys = mask.BLOCK_SIZE
    block = f"{TABLE}[b,h,q//{rows},k//{keys}]"
    seen = f"({block}=={FULL})|(({block}=={PARTIAL})&{predicate})" if predicate else f"{block}>{EMPTY}"
    return f"where({seen},{score or 's'},-inf)"


def agrees(mask: BlockMask, known: Kept, band: Band) -> bool:
    """Whether the lists, with a predicate that shows this band, show just the band. The first call of a band waits for
    the device."""
    if band not in known.agrees:
        table, device = table_of(mask, band.seqlen_k), mask.kv_indices.device
        firsts, lasts = [], []
        for size, count, length in zip(mask.BLOCK_SIZE, table.shape[2:], (band.seqlen_q, band.seqlen_k), strict=True):
            first = torch.arange(count, device=device) * size
            firsts.append(first)
            lasts.append((first + size - 1).clamp(max=length - 1))
        least, most = firsts[1] - lasts[0][:, None], lasts[1] - firsts[0][:, None]  # of key - query
        low = -band.seqlen_q if band.lowest is None else band.lowest
        high = band.seqlen_k if band.highest is None else band.highest
        empty, full = (most < low) | (least > high), (least >= low) & (most <= high)
        fits = (empty & (table != FULL)) | (full & (table != EMPTY)) | (~empty & ~full & (table == PARTIAL))
        known.agrees[band] = bool(fits.all())
    return known.agrees[band]


def authoritative(mask: BlockMask, seqlen_k: int) -> BlockMask:
    """The same mask with a `mask_mod` that knows the lists: torch's FlexAttention asks that alone where it is not
    compiled."""
    table, inner, (rows, keys) = table_of(mask, seqlen_k), mask.mask_mod, mask.BLOCK_SIZE
    by_batch, by_head = (int(size > 1) for size in table.shape[:2])

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block = table[b * by_batch, h * by_head, q // rows, k // keys]
        return (block == FULL) | ((block == PARTIAL) & inner(b, h, q, k))

    made = copy.copy(mask)
    made.mask_mod = seen
    return made
