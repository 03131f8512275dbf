"""A `score_mod` that hides keys by -inf, as a block mask: lists are made of its condition in each call, as captured
tensors may change from call to call, so that hidden tiles are not computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from evoattn.families.mask_blocks import MaskShape
from evoattn.model.score import depends_on, parse_predicate
from evoattn.ops import block_masks
from evoattn.ops.arguments import Score
from evoattn.ops.block_masks import BLOCK
from evoattn.ops.call import Call
from evoattn.ops.torch_answer import is_promised

LEAST_SCORES = 1 << 26
"""Of all heads. Making lists takes some 10 to 20 µs, fewer scores some 50."""
MOST_SHARE = 0.75
"""Of the blocks that are computed: lists of more save less than they cost."""
MOST_KNOWN = 1024
_known: dict[Hashable, str] = {}
"""The counts of the first mask of such a condition and size; empty where lists are not worth it."""


def mask_of(
    call: Call, predicate: str, tables: dict[str, Tensor], score_mod: Callable[..., Any] | None
) -> BlockMask | None:
    """The mask of a call whose `score_mod` shows what `predicate` says of `tables`; None where all scores are to be
    computed. The first of a kind waits for the device; none is made of it while a graph is being captured."""
    query, key, where = call.query, call.key, call.query.device
    (batch, heads, rows, _), keys = query.shape, key.shape[2]
    own = {name: table for name, table in tables.items() if f"{name}[" in predicate}
    if batch * heads * rows * keys < LEAST_SCORES or is_promised(call.batch_invariant):
        return None
    if any(table.requires_grad for table in own.values()):
        return None
    described = Score.of_texts("", predicate, own).tables
    kind = predicate, described, query.shape, keys, where
    counts = _known.get(kind)
    if counts == "" or (counts is None and query.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    tree = parse_predicate(predicate, described, True).tree
    by_batch, by_head = (depends_on(tree, name) for name in "bh")
    shape = MaskShape(batch if by_batch else 1, heads if by_head else 1, rows, keys, BLOCK, BLOCK)

    def shown(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert score_mod is not None
        score: Tensor = score_mod(torch.ones((), device=q.device), b, h, q, k)
        return score > -torch.inf

    made = None if shape.why_not() else block_masks.created(shown, shape, where, predicate, own, None)
    if counts is None:
        counts = "" if made is None else block_masks.counted(made).counts
        partial, full, _ = map(int, (counts or "0/0/0").split("/"))
        counts = counts if partial + full <= MOST_SHARE * shape.blocks[1] else ""
        if len(_known) >= MOST_KNOWN:
            _known.clear()
        _known[kind] = counts
    if made is None or not counts:
        return None
    block_masks.kept(made).counts = counts
    return made
