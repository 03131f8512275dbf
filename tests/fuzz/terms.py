"""The tensors of a drawn call beside query, key and value: sinks, biases and masks, and tables of pages."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.fuzz.calls import Call

WILD = 1 << 30
"""No page has this number."""


def with_hidden(sinks: Tensor) -> Tensor:
    """Every third sink is -inf, as if there were none."""
    sinks[::3] = -math.inf
    return sinks


def bias(call: Call, numbers: Callable[..., Tensor], filled: bool) -> Tensor:
    """A bias or an `attn_mask` of the call, of four dimensions or fewer."""
    sizes = {"b": call.batch, "h": call.heads, "q": call.seqlen_q, "k": call.seqlen_k}
    made = numbers(*(size if name in call.bias else 1 for name, size in sizes.items()))
    if call.mask and filled:
        hidden = made > 0.5
        made = ~hidden if call.mask == "bool" else made.masked_fill(hidden, -math.inf)
    return _placed(made, call, tuple(sizes.values()))


def _placed(made: Tensor, call: Call, whole: tuple[int, ...]) -> Tensor:
    """The same numbers, lying as the call says; expanded, all that it is broadcast to."""
    if call.bias_places == "expanded":
        return made.expand(whole)
    if call.bias_places == "turned":
        return made.mT.contiguous().mT
    if call.bias_places == "odd start":
        room = made.new_empty(made.numel() + 3)
        return room[3:].view(made.shape).copy_(made)
    if call.bias_places == "fewer dimensions":
        while made.dim() > 2 and made.shape[0] == 1:
            made = made[0]
    return made


def table(call: Call, pages: int, used: Tensor, lengths: torch.Generator) -> Tensor:
    """The pages of each sequence, `[batch, most pages]`."""
    own = -(-call.seqlen_k // call.page)
    order = torch.randperm(pages, generator=lengths)[: call.batch * own].view(call.batch, own)
    if call.table == "shared":
        order = order[:1].expand(call.batch, -1).contiguous()
    if call.table == "wild":
        needed = (used.cpu().long() + call.page - 1) // call.page
        numbers = torch.tensor([WILD, -WILD]).repeat(own)[:own].expand(call.batch, -1)
        order = torch.where(torch.arange(own) >= needed[:, None], numbers, order)
    order = order.to(used.device, torch.int64 if call.table == "int64" else torch.int32)
    return order.mT.contiguous().mT if call.table == "turned" else order
