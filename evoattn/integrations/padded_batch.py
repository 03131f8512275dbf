"""Batches whose padding is on one side, as tokenizers make them: a mask tensor carries what kernels take in its place.

Keys behind the text of each row are keys that are not in use. Under a causal mask a row is two packed sequences, its
text and its padding, whichever comes first; they lie end to end as they are, so that nothing is moved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evoattn.ops import current, varied
from evoattn.ops.ordinary import is_ordinary
from evoattn.ops.runtime import NoKernel
from evoattn.ops.variant import Variant
from evoattn.ops.varlen import attention_varlen

MARK = "evoattn_padded"
"""The attribute of a mask tensor. What a model makes of the tensor has none, and counts as any other mask."""


@dataclass(frozen=True)
class Padded:
    """What a mask tensor says. `causal` and `window`, the keys that a query sees, must be those of the layer; `lengths`
    are the keys of each row, int32 `[batch]`, where they come first and the mask is not causal; `starts`, int32
    `[2 · batch + 1]`, is where texts and paddings begin, and the last one ends, where it is."""

    causal: bool
    window: int | None
    lengths: Tensor | None
    starts: Tensor | None
    version: int
    """Of the tensor's contents: nobody has written to it since."""


def mark(mask: Tensor, padding: Tensor, causal: bool, window: int | None = None) -> None:
    """Have a mask tensor of these real tokens, bool `[batch, keys]`, carry a `Padded`, if they come first in each row,
    or last under a causal mask. Waits for the device, as `sdpa_mask` does; not in a capture or a trace.
    """
    if torch.compiler.is_compiling():  # which cannot ask what follows
        return
    runtime = current.runtime()
    if runtime.platform is None or mask.device.type != runtime.device_type or mask.is_inference():
        return  # of inference tensors nobody knows whether they were written to
    if not is_ordinary(mask, padding, mask) or runtime.platform.capturing():
        return
    rows, keys = padding.shape
    lengths, first = padding.sum(1, dtype=torch.int32), padding[:, 0]
    sides = (padding[:, 1:] != padding[:, :-1]).sum(1) <= 1
    if not bool((sides if causal else sides & first).all()):
        return
    starts = None
    if causal:
        begin = torch.arange(rows, dtype=torch.int32, device=mask.device) * keys
        middle = begin + torch.where(first, lengths, keys - lengths)
        starts = torch.nn.functional.pad(torch.stack((begin, middle), 1).flatten(), (0, 1), value=rows * keys)
    setattr(mask, MARK, Padded(causal, window, None if causal else lengths, starts, mask._version))


def padded_of(mask: Tensor | None, query: Tensor, key: Tensor, causal: bool, window: int | None) -> Padded | None:
    """What a mask tensor carries for a layer; None where that is nothing, or does not hold any more, for a mask that is
    broadcast to the tensors `[batch, heads, seqlen, head_dim]`, in compiled code, which cannot ask its version, and in
    a capture, before whose replays somebody may write to it."""
    if mask is None or torch.compiler.is_compiling():
        return None
    found: Padded | None = getattr(mask, MARK, None)
    if found is None or mask._version != found.version:
        return None
    platform = current.runtime().platform
    if platform is None or platform.capturing():
        return None
    if (mask.shape[0], *mask.shape[2:]) != (query.shape[0], query.shape[2], key.shape[2]):
        return None
    return found if (found.causal, found.window) == (causal, window) else None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padded: Padded,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor | None:
    """`[batch, seqlen_q, heads, head_dim]`, or None where no kernel serves this. Under a causal mask what padding gets
    is of other padding alone."""
    try:
        if padded.starts is None:
            variant = Variant(softcap=softcap, sinks=sinks, bias=bias, seqused=padded.lengths)
            answer = varied.attention(
                query, key, value, variant, False, scale, True, "lower_right", False, None, strict=True
            )
            assert isinstance(answer, Tensor)
            return answer.transpose(1, 2).contiguous()
        if bias is not None:
            return None
        batch, _, seqlen = query.shape[:3]
        queries, keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        answer = attention_varlen(
            queries,
            keys,
            values,
            padded.starts,
            padded.starts,
            seqlen,
            seqlen,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if padded.window is None else (padded.window - 1, -1),
            softcap=softcap,
            sinks=sinks,
            strict=True,
        )
        assert isinstance(answer, Tensor)
        return answer.reshape(batch, seqlen, *answer.shape[1:]).contiguous()
    except NoKernel:
        return None
