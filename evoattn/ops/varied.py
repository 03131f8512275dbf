"""`evoattn.attention` beyond plain attention, whatever its tensors are."""

from __future__ import annotations

import torch
from torch import Tensor

from evoattn.ops import capture, variant_call
from evoattn.ops.autocast import autocast, has_autocast
from evoattn.ops.given_out import require_out
from evoattn.ops.ordinary import is_ordinary
from evoattn.ops.variant import Variant


def attention(
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
    strict: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `evoattn.attention`; of packed sequences `evoattn.attention_varlen`, of pages `evoattn.attention_paged`.

    Raises `NoKernel` under `strict` where no kernel serves the call, and `ValueError` for a variant or an `out` that
    does not fit.
    """
    kind, watched = query.device.type, torch.compiler.is_compiling() or not is_ordinary(query, key, value)
    if has_autocast(kind):
        query, key, value = autocast(kind, query, key, value)
        variant = variant.on_all(lambda tensor: autocast(kind, tensor)[0])
    if out is not None:
        require_out(out, query, value)
    if watched:
        variant.require(query, key)
    if watched and variant.seqused is not None and not return_lse:
        from evoattn.ops.cache_op import traced  # imports torch._dynamo, which whoever traces has done already

        answer = traced(query, key, value, variant, is_causal, scale, enable_gqa, causal, strict)
        if answer is not None:
            return answer if out is None else out.copy_(answer)
    asked_for = query, key, value, variant, is_causal, scale, enable_gqa, causal, return_lse, out
    if watched:
        return variant_call.by_torch(variant_call.WATCHED, *asked_for, strict)
    if not capture.thread.shapes:
        return variant_call.answer(*asked_for, strict)
    variant.require(query, key)
    fields = variant.fields(is_causal, query, key)
    with capture.call(query, key, value, is_causal, causal, enable_gqa, return_lse, fields):
        return variant_call.answer(*asked_for, strict)
