"""FlashAttention's answers by the formula, in float64 and one sequence at a time, to hold evoattn's functions to."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Asked:
    """What is asked of each sequence; names are those of FlashAttention 3."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    attention_chunk: int = 0
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    s_aux: Tensor | None = None

    def of(self, q: Tensor, k: Tensor, v: Tensor, sequence: int = 0, qv: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output `[rows, heads, head_dim]` and log-sum-exp `[heads, rows]` of q `[rows, heads, head_dim]`, k and v
        `[keys, kv_heads, head_dim]`, all in float64 and with gradients."""
        q, k, v = q.double(), k.double(), v.double()
        heads = q.shape[1]
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k)
        width = q.shape[2]
        if qv is not None:
            scores, width = scores + torch.einsum("qhd,khd->hqk", qv.double(), v), width + v.shape[2]
        scores = scores * (1 / math.sqrt(width) if self.softmax_scale is None else self.softmax_scale)
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        middle = torch.arange(len(q))[:, None] + len(k) - len(q)
        keys = torch.arange(len(k))
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes if self.alibi_slopes.dim() == 1 else self.alibi_slopes[sequence]
            scores = scores - slopes.double()[:, None, None] * (keys - middle).abs()
        past, ahead = self.window_size[0], 0 if self.causal else self.window_size[1]
        seen = torch.ones(len(q), len(k), dtype=torch.bool)
        if past != -1:
            seen &= keys >= middle - past
        if ahead != -1:
            seen &= keys <= middle + ahead
        if self.attention_chunk:
            first = middle - middle % self.attention_chunk
            seen &= (keys >= first) & (keys < first + self.attention_chunk)
        scores = scores.masked_fill(~seen, -math.inf)
        if self.s_aux is not None:
            column = self.s_aux.double()[:, None, None].expand(heads, len(q), 1)
            scores = torch.cat((scores, column), dim=-1)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.where(seen, torch.exp(scores[..., : len(k)] - lse[..., None]), 0.0)
        return torch.einsum("hqk,khd->qhd", weights, v), lse


def turned(rows: Tensor, cos: Tensor, sin: Tensor, first: int, step: int, interleaved: bool) -> Tensor:
    """Rotary embedding of `[rows, heads, head_dim]`: row i stands at position first + step · i."""
    half, out = cos.shape[1], rows.double().clone()
    for i in range(len(rows)):
        c, s = cos[first + step * i].double(), sin[first + step * i].double()
        one = slice(0, 2 * half, 2) if interleaved else slice(0, half)
        two = slice(1, 2 * half, 2) if interleaved else slice(half, 2 * half)
        x, y = rows[i, :, one].double(), rows[i, :, two].double()
        out[i, :, one], out[i, :, two] = x * c - y * s, x * s + y * c
    return out.to(rows.dtype)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
