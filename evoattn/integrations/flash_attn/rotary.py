"""Rotary embedding by torch, as FlashAttention applies it to queries and to keys that are appended.

The method: Su et al., RoFormer, https://arxiv.org/abs/2104.09864."""

import torch
from torch import Tensor


def rotated(rows: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """The first `2 · cos.shape[1]` columns of each head turned by the angle of its row's position, the others as they
    are.

    rows `[…, heads, head_dim]`, positions `[…]` of the same leading dimensions, cos and sin `[positions, columns / 2]`.
    `interleaved` pairs columns 0 and 1, 2 and 3 …; else 0 and half, 1 and half + 1 … (GPT-NeoX). Computed in float32
    and rounded once. A position behind the table takes its last row: nothing is read out of bounds."""
    half = cos.shape[-1]
    if sin.shape != cos.shape or 2 * half > rows.shape[-1]:
        raise ValueError(
            f"rotary_cos {list(cos.shape)} and rotary_sin {list(sin.shape)} must be of one shape, [positions, columns],"
            f" with at most half of the head_dim of {rows.shape[-1]} columns."
        )
    where = positions.long().clamp(0, cos.shape[0] - 1)
    c, s = (table.float()[where].unsqueeze(-2) for table in (cos, sin))
    turned, rest = rows[..., : 2 * half].float(), rows[..., 2 * half :]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = first * c - second * s, first * s + second * c
    joined = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((joined.to(rows.dtype), rest), dim=-1)
