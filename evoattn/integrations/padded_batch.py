"""Mask tensors that carry what kernels take in their place: of layers that get one though nothing is hidden but what a
causal mask or a window hides, and of batches whose padding is on one side, as tokenizers make them.

Keys behind the text of each row are keys that are not in use. Under a causal mask or in a window a row is two packed
sequences, its text and its padding, whichever comes first; they lie end to end as they are, so that nothing is moved.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from evoattn.ops.arguments import is_ordinary
from evoattn.ops.attention import attention as unpadded
from evoattn.ops.attention import attention_varlen
from evoattn.ops.runtime import current
from evoattn.ops.torch_answer import NoKernel

MARK = "evoattn_padded"
"""The attribute of a mask tensor. What a model makes of the tensor has none, and counts as any other mask."""


@dataclass(frozen=True)
class Padded:
    """What a mask tensor says. `window` is `(past, ahead)`, the keys that a query sees beside its own, -1 for an open
    side; it and `causal` count from the last query, which is of the last key. Of padding: `lengths`, int32 `[batch]`,
    are the keys of each row, where they come first and the mask has neither; `starts`, int32 `[2 · batch + 1]`, is
    where texts and paddings begin, and the last one ends, where it has. Without either there is no padding."""

    causal: bool
    window: tuple[int, int] | None
    lengths: Tensor | None
    starts: Tensor | None
    version: int
    """Of the tensor's contents: nobody has written to it since."""


def may_mark(mask: Tensor) -> bool:
    """Whether `mark` would say anything on this tensor: where kernels run, and not in a capture."""
    runtime = current.runtime()
    if runtime.platform is None or mask.device.type != runtime.device_type or mask.is_inference():
        return False  # of inference tensors nobody knows whether they were written to
    return is_ordinary(mask, mask, mask) and not runtime.platform.capturing()


def mark(mask: Tensor, padding: Tensor | None, causal: bool, window: tuple[int, int] | None = None) -> None:
    """Have a mask tensor `[batch, 1, queries, keys]` carry a `Padded`, if its real tokens, bool `[batch, keys]`, come
    first in each row, or, as a causal mask or a window takes it, last. Waits for the device where there is such a
    tensor, as `sdpa_mask` does; not in a capture."""
    if not may_mark(mask) or not is_ordinary(mask, mask if padding is None else padding, mask):
        return
    lengths = starts = None
    if padding is not None:
        rows, keys = padding.shape
        lengths, first = padding.sum(1, dtype=torch.int32), padding[:, 0]
        sides = (padding[:, 1:] != padding[:, :-1]).sum(1) <= 1
        whole, one_side, behind = torch.stack((padding.all(), sides.all(), (sides & first).all())).tolist()
        packed = causal or window is not None
        if not whole and not (one_side and mask.shape[2] == keys if packed else behind):
            return
        if packed and not whole:
            begin = torch.arange(rows, dtype=torch.int32, device=mask.device) * keys
            middle = begin + torch.where(first, lengths, keys - lengths)
            starts = torch.nn.functional.pad(torch.stack((begin, middle), 1).flatten(), (0, 1), value=rows * keys)
        if packed or whole:
            lengths = None
    setattr(mask, MARK, Padded(causal, window, lengths, starts, mask._version))


def padded_of(mask: Tensor | None, query: Tensor, key: Tensor) -> Padded | None:
    """What a mask tensor carries; None where that is nothing, or does not hold any more, for a mask that is broadcast
    to the tensors `[batch, heads, seqlen, head_dim]`, in compiled code, which cannot ask its version, and in a capture,
    before whose replays somebody may write to it."""
    if mask is None or torch.compiler.is_compiling():
        return None
    found: Padded | None = getattr(mask, MARK, None)
    if found is None or mask._version != found.version:
        return None
    platform = current.runtime().platform
    if platform is None or platform.capturing():
        return None
    return found if (mask.shape[0], *mask.shape[2:]) == (query.shape[0], query.shape[2], key.shape[2]) else None


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
    """`[batch, seqlen_q, heads, head_dim]`, or None where no kernel serves this. Under a causal mask, and in a window,
    what padding gets is of other padding alone."""
    try:
        if padded.starts is None:
            answer = unpadded(
                query,
                key,
                value,
                scale=scale,
                enable_gqa=True,
                causal=padded.causal,
                strict=True,
                window=padded.window,
                softcap=softcap,
                sinks=sinks,
                bias=bias,
                seqused_k=padded.lengths,
            )
            return answer.transpose(1, 2).contiguous()
        if bias is not None:
            return None
        batch, _, seqlen = query.shape[:3]
        queries, keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        packed = attention_varlen(
            queries,
            keys,
            values,
            padded.starts,
            padded.starts,
            seqlen,
            seqlen,
            scale=scale,
            causal=padded.causal,
            window=padded.window,
            softcap=softcap,
            sinks=sinks,
            strict=True,
        )
        assert isinstance(packed, Tensor)
        return packed.reshape(batch, seqlen, *packed.shape[1:]).contiguous()
    except NoKernel:
        return None
