"""`evoattn.attention_varlen`: attention of sequences that are packed end to end, as training and serving have them."""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor

from evoattn.ops import asked, varied
from evoattn.ops.autocast import autocast, has_autocast
from evoattn.ops.given_out import require_out
from evoattn.ops.ordinary import is_ordinary
from evoattn.ops.variant import Variant, closed


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    strict: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each sequence's queries over its own keys; arguments and defaults are those of flash-attention's
    `flash_attn_varlen_func`.

    Shapes: query `[total_q, heads, head_dim]`, key and value `[total_k, kv_heads, head_dim]`, of any strides; heads
    are a multiple of kv_heads. cu_seqlens_q and cu_seqlens_k, int32 `[sequences + 1]` on the device, say where each
    sequence begins and the last one ends; max_seqlen_q and max_seqlen_k, at least the longest lengths, are numbers; a
    tensor's value is waited for. A sequence may have no queries, or no keys; a query that sees no key has the output 0.
    Rows behind the last sequence have answers that mean nothing, and are counted: there are at most as many rows as
    sequences of the longest lengths have.

    With `causal`, and in `window_size` `(past, ahead)`, query i of a sequence counts from its key i + keys - queries,
    so that the last query sees the last key (`causal="lower_right"` of `evoattn.attention`); -1 leaves a side open.
    `softmax_scale` is 1/sqrt(head_dim) unless given; `softcap`, `alibi_slopes`, `sinks`, `out` and `strict` are those
    of `evoattn.attention`. The answer has query's shape, dtype and memory layout; `return_lse` adds the natural
    logarithm of each query's sum of exponentials, `[heads, total_q]` float32.

    The best known kernel runs; else torch's `varlen_attn`, or, where that lacks what is asked, SDPA over the sequences
    padded to their longest. Lengths are not read on the host, and nothing waits for the device. Raises `ValueError`
    for arguments that do not fit, `TypeError` for ones of the wrong type, and `NoKernel` under `strict` where no kernel
    serves the call.
    """
    if not torch.compiler.is_compiling():
        softmax_scale = None if softmax_scale is None else asked.number("softmax_scale", softmax_scale)
        asked.require_flags(causal=causal)
    softcap = asked.cap(softcap)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 3:
            raise ValueError(f"{name} must have three dimensions, [total, heads, head_dim], not {list(tensor.shape)}.")
    if (
        key.shape[:2] != value.shape[:2]
        or key.shape[2] != query.shape[2]
        or not key.shape[1]
        or query.shape[1] % key.shape[1]
    ):
        raise ValueError(
            f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit: key and value "
            "have as many rows and heads, key has query's head_dim, and query's heads are a multiple of theirs."
        )
    if out is not None:
        require_out(out, query, value)
    if has_autocast(query.device.type):
        query, key, value = autocast(query.device.type, query, key, value)
    variant = Variant(
        closed(window_size),
        softcap,
        sinks,
        alibi_slopes,
        starts=(cu_seqlens_q, cu_seqlens_k),
        longest=(_whole("max_seqlen_q", max_seqlen_q), _whole("max_seqlen_k", max_seqlen_k)),
    )
    if not return_lse and (torch.compiler.is_compiling() or not is_ordinary(query, key, value)):
        from evoattn.ops.varlen_op import traced  # imports torch._dynamo, which whoever traces has done already

        done = traced(query, key, value, variant, causal, softmax_scale, strict)
        if done is not None:
            return done if out is None else out.copy_(done)
    answer = varied.attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        variant,
        causal,
        softmax_scale,
        True,
        "lower_right",
        return_lse,
        None if out is None else out.transpose(0, 1)[None],
        strict,
    )
    if isinstance(answer, Tensor):
        return answer[0].transpose(0, 1) if out is None else out
    return (answer[0][0].transpose(0, 1) if out is None else out), answer[1][0]


def _whole(name: str, length: int) -> int:
    """NumPy's numbers and tensors of one element as Python's int; a trace's symbols as they are. Raises `TypeError`."""
    try:
        return length if isinstance(length, (int, torch.SymInt)) else index(length)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {length!r}.") from None
