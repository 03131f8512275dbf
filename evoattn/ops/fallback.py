"""What torch computes where no kernel of ours runs: `scaled_dot_product_attention`, also under the other causal mask
and with a log-sum-exp.
"""

from __future__ import annotations

from torch import Tensor

from evoattn.ops import formula, padded
from evoattn.ops.autocast import without_autocast
from evoattn.ops.formula import log_sum_exp
from evoattn.ops.torch_sdpa import lower_right_mask, sdpa, without_unseen
from evoattn.ops.variant import Variant


def attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None, enable_gqa: bool, causal: str
) -> Tensor:
    """SDPA's answer; its errors are raised as they are. Under `causal="lower_right"` a query that sees no key has the
    output 0.
    """
    if is_causal and causal == "lower_right" and query.shape[-2] != key.shape[-2]:
        mask = lower_right_mask(query.shape[-2], key.shape[-2], query.device)
        answer = sdpa(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
        return without_unseen(answer, mask) if query.shape[-2] > key.shape[-2] else answer
    return sdpa(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal: str,
    return_lse: bool,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A call of `evoattn.attention` without a variant: the answer, in `out` if there is one, with `return_lse` the
    log-sum-exp beside it."""
    answer = attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, causal=causal)
    answer = answer if out is None else out.copy_(answer)
    if not return_lse:
        return answer
    with without_autocast(query.device.type):
        return answer, log_sum_exp(query, key, is_causal=is_causal, scale=scale, causal=causal)


def varied(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: Variant,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal: str,
    return_lse: bool,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `call`, of a variant of attention."""
    with without_autocast(query.device.type):
        if variant.starts is not None:
            answer, lse = padded.attention(
                query, key, value, variant, is_causal=is_causal, scale=scale, wants_lse=return_lse
            )
        else:
            answer, lse = formula.attention(
                query,
                key,
                value,
                variant,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
                causal=causal,
                wants_lse=return_lse,
            )
    answer = answer if out is None else out.copy_(answer)
    return answer if lse is None else (answer, lse)
