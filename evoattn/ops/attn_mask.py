"""`attn_mask` of `evoattn.attention`: which of its other arguments says the same."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from evoattn.ops import capture
from evoattn.ops.formula import FLOATS
from evoattn.ops.given_out import require_out
from evoattn.ops.runtime import NoKernel
from evoattn.ops.torch_sdpa import sdpa

Causal = Literal["upper_left", "lower_right"]
CAUSAL_BIAS = "torch.nn.attention.bias", "CausalBias"
"""The class of torch's causal masks by its names: an import takes two seconds, and a compiler that looks for it in
`sys.modules` fails where an import adds to them meanwhile."""

NO_TENSOR = "an argument is not a tensor"


def causal_kind(mask: Any) -> Causal | None:
    """Which causal mask an object of `torch.nn.attention.bias` stands for; None for any other tensor."""
    kind = type(mask)
    if kind is Tensor or (kind.__module__, kind.__name__) != CAUSAL_BIAS:
        return None
    return "lower_right" if mask.variant.name == "LOWER_RIGHT" else "upper_left"


def as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """The mask as a bias that is added to scores: -inf where a bool one hides, else the mask itself."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def why_only_torch(mask: Any, query: Any, key: Any, is_causal: bool, enable_gqa: bool) -> str | None:
    """One reason, without a full stop, why only SDPA can answer to a mask, or refuse it; None where it is a bias of a
    kernel or torch's causal mask."""
    if causal_kind(mask) is not None:
        return None
    if not all(isinstance(tensor, Tensor) for tensor in (mask, query, key)):
        return NO_TENSOR
    if is_causal:
        return "there are an attn_mask and is_causal"
    if query.dtype not in FLOATS:
        return f"kernels take tensors of float16, bfloat16 and float32, not {str(query.dtype).removeprefix('torch.')}"
    if mask.dtype not in (torch.bool, query.dtype):
        return f"attn_mask is {mask.dtype} beside {query.dtype}, which kernels would round"
    if not (query.dim() == key.dim() == 4 and 2 <= mask.dim() <= 4):
        return "kernels take tensors of four dimensions, and masks of two to four"
    if key.shape[1] != query.shape[1] and not enable_gqa:
        return f"{key.shape[1]} K/V heads for {query.shape[1]} query heads need enable_gqa=True"
    whole = (*query.shape[:3], key.shape[2])
    if any(have not in (1, want) for have, want in zip(mask.shape[::-1], whole[::-1], strict=False)):
        return f"attn_mask is not broadcastable to {list(whole)}"
    return None


def said_by(
    mask: Any, query: Tensor, key: Tensor, is_causal: bool, causal: Causal, bias: Tensor | None
) -> tuple[bool, Causal, Tensor | None]:
    """(`is_causal`, `causal`, `bias`) that say what these and the mask do. Nothing is read back from the device.

    Raises `ValueError` for a mask beside `is_causal` or a bias, and for a causal one of other lengths, `TypeError` for
    what is no tensor.
    """
    if is_causal:
        raise ValueError("attn_mask and is_causal exclude each other.")
    if bias is not None:
        raise ValueError("attn_mask and bias exclude each other; add the bias to the mask.")
    kind = causal_kind(mask)
    if kind is None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"attn_mask must be a tensor, not {type(mask).__name__}.")
        return False, causal, as_bias(mask, query)
    of, lengths = (mask.seq_len_q, mask.seq_len_kv), (query.shape[-2], key.shape[-2])  # its shape is something else
    if of != lengths:
        raise ValueError(f"attn_mask is a causal mask of {of[0]} queries and {of[1]} keys, not of {lengths}.")
    return True, kind, None


def masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    out: Tensor | None,
    strict: bool,
    reason: str,
) -> Tensor:
    """SDPA's answer to a mask that no kernel takes, and its errors."""
    if capture.recorders():
        capture.miss(reason)
    if strict:
        raise NoKernel(f"No kernel serves this call: {reason}.")
    answer = sdpa(query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if out is None:
        return answer
    require_out(out, query, value)
    return out.copy_(answer)
