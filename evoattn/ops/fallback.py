"""What torch computes where no kernel of ours runs: `scaled_dot_product_attention`, also under the other causal mask
and with a log-sum-exp.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SCORES_PER_CHUNK = 1 << 26
"""Scores that the log-sum-exp makes at once: 256 MiB in float32."""
SDPA = torch._C._nn.scaled_dot_product_attention
"""`torch.nn.functional.scaled_dot_product_attention` itself, whatever `evoattn.sdpa` puts in its place."""


def lower_right_mask(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """Bool `[seqlen_q, seqlen_k]`: query i sees keys j <= i + seqlen_k - seqlen_q."""
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).tril(diagonal=seqlen_k - seqlen_q)


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None, enable_gqa: bool, causal: str
) -> Tensor:
    """SDPA's answer; its errors are raised as they are. Under `causal="lower_right"` a query that sees no key has the
    output 0.
    """
    if is_causal and causal == "lower_right" and query.shape[-2] != key.shape[-2]:
        mask = lower_right_mask(query.shape[-2], key.shape[-2], query.device)
        return SDPA(query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return SDPA(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def log_sum_exp(query: Tensor, key: Tensor, *, is_causal: bool, scale: float | None, causal: str) -> Tensor:
    """Natural logarithm of the sum of exponentials of each query's masked and scaled scores, `[batch, heads,
    seqlen_q]` float32.

    `-inf` for a query that sees no key. Scores are made in float32, some rows at a time.
    """
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    keys = key.float().repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3).transpose(-1, -2)
    rows = max(1, SCORES_PER_CHUNK // max(1, query[..., 0, 0].numel() * seqlen_k))
    offset = seqlen_k - seqlen_q if causal == "lower_right" else 0
    columns = torch.arange(seqlen_k, device=query.device)
    parts = []
    for first in range(0, seqlen_q, rows):
        scores = (query[..., first : first + rows, :].float() * factor) @ keys
        if is_causal:
            last = torch.arange(first, first + scores.shape[-2], device=query.device)[:, None] + offset
            scores = scores.masked_fill(columns > last, -math.inf)
        parts.append(torch.logsumexp(scores, dim=-1))
    return torch.cat(parts, dim=-1) if parts else query.new_empty(query.shape[:-1], dtype=torch.float32)
