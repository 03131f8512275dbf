"""FlashAttention 3 as `attn_implementation="fa3"` of transformers, for `models_table.py`: what its wheel `fa3-fwd`
serves, and "sdpa" for the rest.

Served: layers without a mask tensor, a window or a bias. The wheel is built without windows; no build has biases, or
sinks, which "sdpa" lacks too."""

from typing import Any

import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from evoattn.peers import fa3

NAME = "fa3"


def register() -> bool:
    """Whether it is installed; then transformers knows the name."""
    try:
        fa3.find("bf16")
    except (ImportError, RuntimeError):
        return False
    transformers.AttentionInterface.register(NAME, forward)
    transformers.AttentionMaskInterface.register(NAME, sdpa_mask)
    return True


def forward(  # noqa: PLR0913 — as transformers calls it
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """As `sdpa_attention_forward`."""
    if others.get("s_aux") is not None:
        raise ValueError("FlashAttention 3 has no sinks.")
    served = attention_mask is None and query.dtype == torch.bfloat16 and query.shape[-1] <= 256
    window = others.get("sliding_window")
    if window and window < key.shape[2]:
        served = False
    if not served or others.get("position_bias") is not None:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, is_causal=is_causal, **others
        )
        return found
    causal = query.shape[2] > 1 and bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    if causal and key.shape[2] > query.shape[2]:  # an empty static cache
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    options = {"softmax_scale": scaling, "softcap": softcap or 0.0}
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    call = fa3.find("bf16").prepare(q, k, v, causal, options)
    made = call()
    return (made[0] if isinstance(made, tuple) else made), None
