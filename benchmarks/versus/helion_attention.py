"""Attention in Helion, with the running maximum and sum of FlashAttention: the loop that its own example has, with a
mask for causal problems (as there, all tiles of keys are walked).

Needs `helion` (1.5.0 was used with torch 2.11; 1.5.1 does not import there).
"""

from __future__ import annotations

import math
from typing import Any

import helion
import helion.language as hl
import torch

LOG2_E = 1.44269504


@helion.kernel(static_shapes=True)  # type: ignore[untyped-decorator]
def full(q_in: torch.Tensor, k_in: torch.Tensor, v_in: torch.Tensor) -> torch.Tensor:
    """O `[batch, heads, seqlen_q, head_dim]` of contiguous q, k and v of as many heads."""
    rows, keys = q_in.size(-2), k_in.size(-2)
    dim = hl.specialize(q_in.size(-1))
    q_of, k_of, v_of = q_in.reshape([-1, rows, dim]), k_in.reshape([-1, keys, dim]), v_in.reshape([-1, keys, dim])
    out = torch.empty_like(q_of)
    scale = LOG2_E / math.sqrt(dim)
    for head, row in hl.tile([q_of.size(0), rows]):
        top = hl.full([head, row], float("-inf"), dtype=torch.float32)
        total = torch.full_like(top, 1.0)
        acc = hl.zeros([head, row, dim], dtype=torch.float32)
        q = q_of[head, row, :]
        for key in hl.tile(keys):
            scores = hl.dot(q * scale, k_of[head, key, :].transpose(1, 2), out_dtype=torch.float32)
            new_top = torch.maximum(top, torch.amax(scores, -1))
            weights = torch.exp2(scores - new_top[:, :, None])
            shrink = torch.exp2(top - new_top)
            total = total * shrink + torch.sum(weights, -1)
            values = v_of[head, key, :]
            acc = hl.dot(weights.to(values.dtype), values, acc=acc * shrink[:, :, None])
            top = new_top
        out[head, row, :] = (acc / total[:, :, None]).to(out.dtype)
    return out.view(q_in.size())


@helion.kernel(static_shapes=True)  # type: ignore[untyped-decorator]
def causal(q_in: torch.Tensor, k_in: torch.Tensor, v_in: torch.Tensor) -> torch.Tensor:
    """As `full`, where query i sees keys 0 to i."""
    rows, keys = q_in.size(-2), k_in.size(-2)
    dim = hl.specialize(q_in.size(-1))
    q_of, k_of, v_of = q_in.reshape([-1, rows, dim]), k_in.reshape([-1, keys, dim]), v_in.reshape([-1, keys, dim])
    out = torch.empty_like(q_of)
    scale = LOG2_E / math.sqrt(dim)
    for head, row in hl.tile([q_of.size(0), rows]):
        top = hl.full([head, row], float("-inf"), dtype=torch.float32)
        total = torch.full_like(top, 1.0)
        acc = hl.zeros([head, row, dim], dtype=torch.float32)
        q = q_of[head, row, :]
        for key in hl.tile(keys):
            scores = hl.dot(q * scale, k_of[head, key, :].transpose(1, 2), out_dtype=torch.float32)
            seen = row.index[None, :, None] >= key.index[None, None, :]
            scores = torch.where(seen, scores, float("-inf"))
            new_top = torch.maximum(top, torch.amax(scores, -1))
            weights = torch.exp2(scores - new_top[:, :, None])
            shrink = torch.exp2(top - new_top)
            total = total * shrink + torch.sum(weights, -1)
            values = v_of[head, key, :]
            acc = hl.dot(weights.to(values.dtype), values, acc=acc * shrink[:, :, None])
            top = new_top
        out[head, row, :] = (acc / total[:, :, None]).to(out.dtype)
    return out.view(q_in.size())


def call_of(mask: str, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
    """A call of the kernel with one of its configs."""
    arguments = (tensors["q"], tensors["k"], tensors["v"])
    run = kernel_of(mask).bind(arguments).compile_config(helion.Config(**config))
    return lambda: run(*arguments)


def kernel_of(mask: str) -> Any:
    """The kernel of `full` or `causal_upper_left`. Raises `KeyError` on other masks."""
    return {"full": full, "causal_upper_left": causal}[mask]
