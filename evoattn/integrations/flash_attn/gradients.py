"""Gradients of attention out of its output and log-sum-exp, by torch: the backward pass that libraries call themselves
where they merge parts of the keys, as context parallelism does.

The formulas: Dao et al., FlashAttention, https://arxiv.org/abs/2205.14135, section B.4."""

import math

import torch
from torch import Tensor

from evoattn.integrations.flash_attn.by_torch import Sequences, added, padded, seen, unpadded
from evoattn.integrations.flash_attn.options import Options

SCORES_AT_ONCE = 1 << 26
"""256 MiB in float32."""
Three = tuple[Tensor, Tensor, Tensor]


def of_batch(
    dout: Tensor, tensors: Three, out: Tensor, lse: Tensor, options: Options, used: Tensor | None = None
) -> Three:
    """Gradients of q, k and v `[batch, heads, rows, head_dim]`; `out` and `lse` `[batch, heads, rows]` may be those of
    more keys than these. In float32, or float64 of float64."""
    q, k, v = (tensor if tensor.dtype == torch.float64 else tensor.float() for tensor in tensors)
    dout, heads, kv_heads = dout.to(q.dtype), q.shape[1], k.shape[1]
    keys, values = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if options.scale is None else options.scale
    shares = (dout * out).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(keys), torch.zeros_like(values)
    step = max(1, SCORES_AT_ONCE // max(1, q.shape[0] * heads * k.shape[2]))
    for first in range(0, q.shape[2], step):
        rows = slice(first, min(first + step, q.shape[2]))
        capped = scores = scale * (q[:, :, rows] @ keys.transpose(-1, -2))
        if options.softcap:
            capped = options.softcap * torch.tanh(scores / options.softcap)
        places = rows, q.shape[2], k.shape[2]
        sloped = capped if options.slopes is None else capped + added(places, options, used, q.dtype)
        weights = torch.exp(sloped - lse[:, :, rows, None].to(q.dtype))
        weights = weights.masked_fill(torch.isneginf(lse[:, :, rows, None]), 0)
        if (mask := seen(places, options, used, q.device)) is not None:
            weights = weights.masked_fill(~mask, 0)
        dscores = weights * (dout[:, :, rows] @ values.transpose(-1, -2) - shares[:, :, rows])
        if options.softcap:
            dscores = dscores * (1 - (capped / options.softcap) ** 2)
        dq[:, :, rows] = scale * (dscores @ keys)
        dk += scale * (dscores.transpose(-1, -2) @ q[:, :, rows])
        dv += weights.transpose(-1, -2) @ dout[:, :, rows]
    dk, dv = (t.unflatten(1, (kv_heads, heads // kv_heads)).sum(2) for t in (dk, dv))
    return dq, dk, dv


def of_sequences(
    dout: Tensor, tensors: Three, out: Tensor, lse: Tensor, options: Options, lengths: tuple[Sequences, Sequences]
) -> Three:
    """The same of packed sequences: q `[total_q, heads, head_dim]`, lse `[heads, total_q]`."""
    q, k, v = tensors
    queries, keys = lengths
    of_queries = [padded(t, queries, at_end=True) for t in (dout, q, out, lse.transpose(0, 1)[..., None])]
    one_dout, one_q, one_out, one_lse = (t.transpose(1, 2) for t in of_queries)
    one_k, one_v = (padded(t, keys, at_end=False).transpose(1, 2) for t in (k, v))
    behind = torch.arange(-queries[2], 0, device=q.device) < -queries[1].long()[:, None]
    one_dout = one_dout.masked_fill(behind[:, None, :, None], 0)  # rows of other sequences
    found = of_batch(one_dout, (one_q, one_k, one_v), one_out, one_lse[..., 0], options, keys[1])
    of_q, of_k, of_v = (tensor.transpose(1, 2) for tensor in found)
    return (
        unpadded(of_q, q.shape[0], queries, at_end=True),
        unpadded(of_k, k.shape[0], keys, at_end=False),
        unpadded(of_v, v.shape[0], keys, at_end=False),
    )
