"""Mask tensors that no causal mask, window or padding says, as block lists: prefixes, chunks, images in text, windows
beside padding in the middle.

Blocks of a mask of bools that are all true are FULL, those with some true PARTIAL, and the others are never loaded. In
PARTIAL blocks kernels read the mask itself. The lists are made once for a tensor, by a kernel; all layers of a forward
pass share them."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from evoattn.integrations.padded_batch import may_mark
from evoattn.model.score import MOST_ELEMENTS
from evoattn.ops import flex
from evoattn.ops.call import Call, terms_of

MARK = "evoattn_lists"
"""The attribute of a mask tensor: its version, and its block mask."""
BLOCK = 128
LEAST_QUERIES = 128
"""Fewer are steps of a cache, of which each has a mask of its own."""


def _seen(mask: Tensor) -> Tensor:
    """`[batch, queries, keys]` of bools, of one batch where all have the same in memory. Detached, as any other view
    holds the tensor: one that has its block mask for an attribute would never be freed."""
    several = mask.shape[0] > 1 and mask.stride(0) > 0
    return mask.detach()[: len(mask) if several else 1, 0]


def block_mask_of(mask: Tensor) -> BlockMask:
    """The block mask of bools `[batch or 1, 1, queries, keys]`, which shows what is true."""
    seen = _seen(mask)
    batch, queries, keys = seen.shape

    def of_batches(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen[b, q, k]

    def of_all(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return seen[0, q, k]

    shows = of_batches if batch > 1 else of_all
    return flex.create_block_mask(shows, batch, None, queries, keys, mask.device, BLOCK)


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, softcap: float, sinks: Tensor | None
) -> Tensor | None:
    """`[batch, seqlen_q, heads, head_dim]`, a row that sees no key 0; or None where no kernel serves this, or lists of
    this mask make no sense: of other than bools, a mask of each head, of none or of more elements than a table has, few
    queries, in compiled code and captures. Waits for the device once for a mask."""
    if torch.compiler.is_compiling() or mask.dtype != torch.bool or query.shape[2] < LEAST_QUERIES:
        return None
    fits = mask.dim() == 4 and mask.shape[0] in (1, query.shape[0]) and mask.shape[1] == 1
    if not fits or mask.shape[2:] != (query.shape[2], key.shape[2]) or not may_mark(mask):
        return None
    version, blocks = getattr(mask, MARK, (None, None))
    if blocks is None or version != mask._version:
        if not 0 < _seen(mask).numel() <= MOST_ELEMENTS:
            return None
        blocks = block_mask_of(mask)
        setattr(mask, MARK, (mask._version, blocks))
    call = Call(query, key, value, scale=scale, enable_gqa=True, softcap=softcap, strict=True)
    call.terms = terms_of(sinks=sinks)
    answer = flex.under_mask(call, blocks)
    return None if answer is None else answer.transpose(1, 2).contiguous()
