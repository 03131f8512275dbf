"""Calls of FlashAttention with tensors of 8 bits and their descale factors."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from evoattn.integrations.flash_attn.options import OPEN, Options
from evoattn.ops.attention_fp8 import attention_fp8
from evoattn.ops.call import E4M3, Answer

LACKING = (
    "fp8 tensors go with a mask, a window, softcap and sinks alone: not with slopes, chunks, dropout or gradients."
)


def takes(q: Tensor) -> bool:
    """Whether q is of a dtype that is multiplied as it is."""
    return q.dtype == E4M3


def scales(q: Tensor, *descales: Tensor | None) -> dict[str, Any]:
    """The `Options` of packed tensors of 8 bits, or of queries of 8 bits over a cache: of q, k and v."""
    q_scale, k_scale, v_scale = descales
    return {
        "q_scale": torch.ones((), device=q.device) if q_scale is None else q_scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, descales: Sequence[Tensor | None]) -> Answer:
    """q `[batch, seqlen_q, heads, head_dim]`, k and v likewise, in e4m3; `descales` of q, k and v, float32 `[batch,
    kv_heads]`. Raises `ValueError` for what `evoattn.attention_fp8` lacks."""
    past, ahead = options.window
    if options.slopes is not None or options.chunk or options.dropout_p or min(past, ahead) < OPEN:
        raise ValueError(LACKING)
    words = {name: options.words[name] for name in ("scale", "causal", "window", "softcap", "sinks", "return_lse")}
    query, key, value = (t.transpose(1, 2) for t in (q, k, v))
    q_descale, k_descale, v_descale = descales
    answer = attention_fp8(query, key, value, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, **words)
    return answer.transpose(1, 2) if isinstance(answer, Tensor) else (answer[0].transpose(1, 2), answer[1])
