"""`attn_implementation="evoattn"` for Hugging Face transformers.

import evoattn.integrations.transformers
evoattn.integrations.transformers.register()
model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="evoattn")

Layers without a mask tensor run `evoattn.attention`: prefill of causal decoders, decoding with a growing cache,
encoders and vision models without padding, cross attention. Mask tensors (padding, a sliding window that is shorter
than the keys, a static cache while decoding), position biases, dropout and gradients take what "sdpa" takes. Attention
sinks and soft-capped scores, which "sdpa" leaves out without a word, are computed as "eager" does.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from evoattn.ops.attention import attention

NAME = "evoattn"


def register() -> None:
    """Make the name known to transformers, as attention and as mask function; a model without the latter would get no
    mask at all.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., bool] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **others: object,
) -> Tensor | None:
    """See `transformers.masking_utils.sdpa_mask`, which makes a mask tensor in every compiled or captured forward
    pass.

    Without padding, a filled cache or a window no tensor is needed there either: None then, and `attention_forward`
    masks by `is_causal`. An exported program keeps the tensor, since it may be called with a single query.
    """
    whole = attention_mask is None and isinstance(q_offset, int) and q_offset == 0 and kv_offset == 0
    whole = whole and q_length == kv_length and (local_size is None or kv_length < local_size)
    if allow_is_causal_skip and whole and not torch.compiler.is_exporting():
        return None
    made: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        **others,
    )
    return made


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """See `transformers.integrations.sdpa_attention.sdpa_attention_forward`.

    query `[batch, heads, seqlen_q, head_dim]`, key and value with `kv_heads` instead; the answer is `[batch, seqlen_q,
    heads, head_dim]`, contiguous. `s_aux` holds a sink per head: one more score in every row's softmax, with no value.
    """
    causal = query.shape[2] > 1 and (is_causal if is_causal is not None else getattr(module, "is_causal", True))
    if softcap is not None or s_aux is not None:
        return _by_hand(query, key, value, attention_mask, dropout, scaling, causal, softcap, s_aux), None
    if attention_mask is not None or position_bias is not None or dropout:
        answer, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
            **others,
        )
        return answer, None
    if causal and key.shape[2] > query.shape[2]:  # an empty static cache: what lies beyond the queries is masked
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    grouped = key.shape[1] != query.shape[1]
    out = attention(query, key, value, is_causal=causal, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


def _by_hand(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention as the formula says it, with all scores in memory."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * (1 / math.sqrt(query.shape[-1]) if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = torch.nn.functional.dropout(weights, dropout)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous()
