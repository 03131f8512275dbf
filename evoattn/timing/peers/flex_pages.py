"""A cache of pages as FlexAttention takes it: one long sequence of keys, and a block mask that says whose they are
(`torch.nn.attention.experimental._paged_attention`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from evoattn.correctness.sequences import NO_PAGE
from evoattn.model.problem import AttentionProblem


def whole_cache(cache: torch.Tensor) -> torch.Tensor:
    """`[1, kv_heads, pages · page, head_dim]` of a cache `[pages, kv_heads, page, head_dim]`: a view where the rows of
    all pages are equally far apart, as those of FlashAttention's caches are."""
    return cache.permute(1, 0, 2, 3).flatten(1, 2)[None]


def physical_blocks(problem: AttentionProblem, tensors: Mapping[str, torch.Tensor], blocks: Any) -> Any:
    """The `BlockMask` of the sequences as one of the cache, whose blocks are pages."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    table, device = tensors["table"].long(), str(tensors["q"].device)
    paged = PagedAttention(problem.shape("k")[0], problem.page, problem.batch, device)
    held = table != NO_PAGE
    paged.page_table[:, : problem.table_pages] = table.masked_fill(~held, 0)
    rows, places = held.nonzero(as_tuple=True)
    paged.physical_to_logical[rows, table[rows, places]] = places
    return paged.convert_logical_block_mask(blocks, kv_len=tensors["seqused"])
