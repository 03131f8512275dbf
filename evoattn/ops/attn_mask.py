"""`attn_mask` of `evoattn.attention`: which of its other arguments says the same."""

from __future__ import annotations

import math
import sys
from typing import Any, Literal

import torch
from torch import Tensor

Causal = Literal["upper_left", "lower_right"]


def causal_kind(mask: Any) -> Causal | None:
    """Which causal mask an object of `torch.nn.attention.bias` stands for; None for any other tensor."""
    module = sys.modules.get("torch.nn.attention.bias")  # who has such an object has imported it, which takes seconds
    if module is None or not isinstance(mask, module.CausalBias):
        return None
    return "lower_right" if mask.variant == module.CausalVariant.LOWER_RIGHT else "upper_left"


def as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """The mask as a bias that is added to scores: -inf where a bool one hides, else the mask itself, which has to be of
    query's dtype as any bias; SDPA takes float32 beside other dtypes."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def said_by(
    mask: Any, query: Tensor, key: Tensor, is_causal: bool, causal: Causal, bias: Tensor | None
) -> tuple[bool, Causal, Tensor | None]:
    """(`is_causal`, `causal`, `bias`) that say what these and the mask do. Nothing is read back from the device.

    Raises `ValueError` for a mask beside `is_causal` or a bias, and for a causal one of other lengths.
    """
    if is_causal:
        raise ValueError("attn_mask and is_causal exclude each other, as in SDPA.")
    if bias is not None:
        raise ValueError("attn_mask and bias exclude each other; add the bias to the mask.")
    kind = causal_kind(mask)
    if kind is None:
        return False, causal, as_bias(mask, query)
    of, lengths = (mask.seq_len_q, mask.seq_len_kv), (query.shape[-2], key.shape[-2])  # its shape is something else
    if of != lengths:
        raise ValueError(f"attn_mask is a causal mask of {of[0]} queries and {of[1]} keys, not of {lengths}.")
    return True, kind, None
