"""`attn_mask` and `dropout_p` of `evoattn.attention`: which of its other arguments says the same as a mask."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from evoattn.ops.arguments import BIAS, MASKS
from evoattn.ops.call import NO_TENSOR, Call, terms_of
from evoattn.ops.torch_answer import FLOATS

CAUSAL_BIAS = "torch.nn.attention.bias", "CausalBias"
"""The class of torch's causal masks by its names: an import takes two seconds, and a compiler that looks for it in
`sys.modules` fails where an import adds to them meanwhile."""
DROPOUT = "kernels have no dropout"
DROPOUT_ALONE = "dropout_p goes with the arguments of SDPA alone: nothing computes it with others."


def causal_kind(mask: Any) -> Literal["upper_left", "lower_right"] | None:
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


def why_only_torch(mask: Any, call: Call) -> str | None:
    """One reason, without a full stop, why only SDPA can answer to a mask, or refuse it; None where it is a bias of a
    kernel or torch's causal mask."""
    query, key = call.query, call.key
    if causal_kind(mask) is not None:
        return None
    if not all(isinstance(tensor, Tensor) for tensor in (mask, query, key)):
        return NO_TENSOR
    if call.causal:
        return "there are an attn_mask and is_causal"
    if query.dtype not in FLOATS:
        return f"kernels take tensors of float16, bfloat16 and float32, not {str(query.dtype).removeprefix('torch.')}"
    if mask.dtype not in (torch.bool, query.dtype):
        return f"attn_mask is {mask.dtype} beside {query.dtype}, which kernels would round"
    if not (query.dim() == key.dim() == 4 and 2 <= mask.dim() <= 4):
        return "kernels take tensors of four dimensions, and masks of two to four"
    if key.shape[1] != query.shape[1] and not call.enable_gqa:
        return f"{key.shape[1]} K/V heads for {query.shape[1]} query heads need enable_gqa=True"
    whole = (*query.shape[:3], key.shape[2])
    if any(have not in (1, want) for have, want in zip(mask.shape[::-1], whole[::-1], strict=False)):
        return f"attn_mask is not broadcastable to {list(whole)}"
    return None


def with_mask(call: Call, mask: Any) -> Call:
    """The call with what the mask says in its own fields. Nothing is read back from the device.

    Raises `ValueError` for a mask beside a causal one or a bias, and for a causal one of other lengths, `TypeError` for
    what is no tensor.
    """
    if call.causal:
        raise ValueError("attn_mask and is_causal or causal exclude each other.")
    if call.term(BIAS) is not None:
        raise ValueError("attn_mask and bias exclude each other; add the bias to the mask.")
    kind, query, key = causal_kind(mask), call.query, call.key
    if kind is None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"attn_mask must be a tensor, not {type(mask).__name__}.")
        terms = list(call.terms or terms_of(bias=mask))
        terms[BIAS] = as_bias(mask, query)
        return replace(call, terms=tuple(terms))
    of, lengths = (mask.seq_len_q, mask.seq_len_kv), (query.shape[-2], key.shape[-2])  # its shape is something else
    if of != lengths:
        raise ValueError(f"attn_mask is a causal mask of {of[0]} queries and {of[1]} keys, not of {lengths}.")
    return replace(call, mask=MASKS[kind])
