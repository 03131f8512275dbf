"""diffusers' attention backend `evoattn`: `model.set_attention_backend("evoattn")` after `register()`.

diffusers' names are members of an enumeration, and its registry is private; here both are those of version 0.42.1:
https://github.com/huggingface/diffusers/blob/main/src/diffusers/models/attention_dispatch.py"""

from typing import Any

from torch import Tensor

from evoattn.ops.attention import attention
from evoattn.ops.call import Answer

NAME = "evoattn"


def register() -> None:
    """Make `evoattn` one of diffusers' attention backends. May be called any number of times."""
    from diffusers.models import attention_dispatch

    names: Any = attention_dispatch.AttentionBackendName
    if NAME not in {one.value for one in names}:
        member = str.__new__(names, NAME)
        member._name_ = member._value_ = NAME
        names._member_map_[NAME] = names._value2member_map_[NAME] = member
        names._member_names_.append(NAME)
    checks = [attention_dispatch._check_device, attention_dispatch._check_shape]
    attention_dispatch._AttentionBackendRegistry.register(names(NAME), constraints=checks)(attend)


def attend(  # noqa: PLR0913 - diffusers' arguments
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Answer:
    """query `[batch, seqlen_q, heads, head_dim]`, key and value `[batch, seqlen_k, kv_heads, head_dim]`; a mask of
    `[batch, seqlen_k]` hides keys. The log-sum-exp is `[batch, seqlen_q, heads]`. Raises `ValueError` for context
    parallelism."""
    if _parallel_config is not None:
        raise ValueError(f"diffusers' backend `{NAME}` has no context parallelism; `native` and `flash` have.")
    if attn_mask is not None and attn_mask.dim() == 2 and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]
    words: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if not return_lse:
        alone: Tensor = attention(q, k, v, attn_mask, dropout_p, **words)
        return alone.transpose(1, 2)
    output, lse = attention(q, k, v, attn_mask, dropout_p, return_lse=True, **words)
    return output.transpose(1, 2), lse.transpose(1, 2)
