"""Which keys a query sees, as FlexAttention asks it, and the block mask of that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from evoattn.model.problem import AttentionProblem

STRIPE = 1 << 26
"""Scores that are looked at together: each is a byte, and for a moment several integers."""


class Visible(Protocol):
    """`mask_mod` of FlexAttention: batch, head, query and key, tensors that broadcast → Bool."""

    def __call__(self, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor: ...


def visible_keys(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor]) -> Visible | None:
    """None where each query sees all keys. Packed sequences count queries and keys from the first of all."""
    if problem.varlen:
        return _in_sequences(problem, tensors)
    used, at_end = tensors.get("seqused"), problem.masking.corner == "lower_right"
    lowest, highest = problem.masking.edges(problem.seqlen_q, problem.seqlen_k)
    if highest is None and used is None:
        return None
    past, ahead = _open(lowest, highest, problem.seqlen_k)

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        keys = problem.seqlen_k if used is None else used[b]
        query = i + keys - problem.seqlen_k if at_end else i
        return (j < keys) & (j <= query + ahead) & (j >= query + past)

    return visible


def _open(lowest: int | None, highest: int | None, keys: int) -> tuple[int, int]:
    """Edges of a band, farther than any key where a side is open."""
    return -keys * 2 if lowest is None else lowest, keys * 2 if highest is None else highest


def _in_sequences(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor]) -> Visible:
    """Of packed sequences: each sees its own keys, up to a diagonal of its own."""
    owner_q, first_q, length_q = _owners(tensors["cu_seqlens_q"])
    owner_k, first_k, length_k = _owners(tensors["cu_seqlens_k"])
    past, ahead = _open(*problem.masking.edges(0, 0), problem.seqlen_q + problem.seqlen_k)
    at_end = problem.masking.corner == "lower_right"

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        mine = owner_q[i]
        query, key = i - first_q[mine], j - first_k[mine]
        query = query + length_k[mine] - length_q[mine] if at_end else query
        return (mine == owner_k[j]) & (key <= query + ahead) & (key >= query + past)

    return visible


def _owners(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(each row's sequence, each sequence's first row and length) out of `cu_seqlens_q` or `cu_seqlens_k`."""
    lengths = starts.diff()
    owners = torch.repeat_interleave(torch.arange(len(lengths), device=starts.device), lengths.long())
    return owners, starts[:-1], lengths


def block_mask(
    visible: Visible,
    batches: int | None,
    rows: int,
    keys: int,
    sizes: tuple[int, int],
    device: torch.device,
    stripe: int = STRIPE,
) -> Any:
    """The `BlockMask` of blocks of `sizes` (queries, keys), the same for all heads; `batches` None: for all batches.

    `create_block_mask` of torch asks for all scores at once, which packed sequences have too many of.
    """
    from torch.nn.attention.flex_attention import BlockMask

    height, width = sizes
    columns = torch.arange(-(-keys // width) * width, device=device)
    step = max(1, stripe // len(columns) // height) * height
    some, whole = [], []
    for batch in range(batches or 1):
        for first in range(0, -(-rows // height) * height, step):
            lines = torch.arange(first, min(first + step, -(-rows // height) * height), device=device)
            inside = (lines < rows)[:, None] & (columns < keys)
            seen = inside & visible(
                torch.tensor(batch, device=device),
                torch.tensor(0, device=device),
                lines.clamp(max=rows - 1)[:, None],
                columns.clamp(max=keys - 1)[None],
            )
            blocks = seen.view(-1, height, len(columns) // width, width).sum((1, 3))
            some.append((blocks > 0) & (blocks < height * width))
            whole.append(blocks == height * width)
    ordered = [_ordered(torch.cat(part).view(batches or 1, 1, -1, part[0].shape[-1])) for part in (some, whole)]
    return BlockMask.from_kv_blocks(*ordered[0], *ordered[1], sizes, visible, (rows, keys))


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(how many blocks of keys each row of blocks has, which: those first) of a Bool `[batch, head, rows, keys]`."""
    counts = blocks.sum(-1, dtype=torch.int32)
    return counts, blocks.int().argsort(dim=-1, descending=True, stable=True).int()
