"""`evoattn.attention`: scaled dot-product attention by the best known kernel, or by torch where there is none."""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor

from evoattn.ops import asked, capture, current, dropout, fallback, varied
from evoattn.ops import attn_mask as attn_masks
from evoattn.ops.autocast import autocast
from evoattn.ops.custom_op import is_fake
from evoattn.ops.given_out import needs_copy, require_out
from evoattn.ops.ordinary import WATCHED, is_ordinary, require_ordinary
from evoattn.ops.runtime import Runtime
from evoattn.ops.variant import Variant, closed

_is_compiling = torch.compiler.is_compiling
_has_autocast = torch.is_autocast_enabled


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: Literal["upper_left", "lower_right"] = "upper_left",
    return_lse: Literal[False] = False,
    out: Tensor | None = None,
    strict: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: Literal["upper_left", "lower_right"] = "upper_left",
    return_lse: Literal[True],
    out: Tensor | None = None,
    strict: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: Literal["upper_left", "lower_right"] = "upper_left",
    return_lse: bool = False,
    out: Tensor | None = None,
    strict: bool = False,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(query keyᵀ · scale + mask) value, as `torch.nn.functional.scaled_dot_product_attention` computes it.

    Shapes: query `[batch, heads, seqlen_q, head_dim]`, key and value `[batch, kv_heads, seqlen_k, head_dim]`, of any
    strides; fewer K/V heads need `enable_gqa`. `scale` is 1/sqrt(head_dim) unless given. With `is_causal` query i sees
    keys j <= i, or, with `causal="lower_right"`, keys j <= i + seqlen_k - seqlen_q. A query that sees no key has the
    output 0.

    Beyond SDPA, in this order: `softcap` makes a scaled score s `softcap · tanh(s / softcap)`, and 0 or None leaves it
    as it is; `alibi_slopes` `[heads]` takes slope · |i + offset - j| from it; `bias`, broadcastable to `[batch, heads,
    seqlen_q, seqlen_k]` and of query's dtype or float32, is added; `window` `(past, ahead)` shows the keys from i +
    offset - past to i + offset + ahead alone, -1 leaving a side open; `sinks` `[heads]` are scores without a value that
    take part in the sum. The offset is that of the causal mask, without one seqlen_k - seqlen_q, as in FlashAttention.
    `seqused_k` `[batch]`, int32 on the device, says how many keys of each batch there are: the others may hold
    anything, and seqlen_k is then that number.
    `attn_mask` is SDPA's: torch's causal masks (`torch.nn.attention.bias`) are known as such, any other is a bias.
    `dropout_p` is SDPA's too, and goes with SDPA's own arguments alone.

    The answer has query's shape, dtype and order of dimensions in memory, but value's head_dim, which may be another;
    `out` takes it instead of a new tensor. A value that is the first columns of key, as `kv[..., :512]` in DeepSeek's
    latent attention, is read once by kernels that know it.
    `return_lse` adds the natural logarithm of each query's sum of exponentials, `[batch, heads, seqlen_q]` float32,
    -inf where it sees no key.

    The best known kernel for the GPU and the problem runs on torch's current stream; the first use of a kernel
    compiles or loads it. What no kernel serves (gradients, dropout, other devices and dtypes, unaligned strides …)
    torch computes. `explain` says which it is, and `strict` raises `NoKernel` instead. Raises what SDPA raises for
    shapes that do not fit, `ValueError` for a wrong `causal`, `out` or argument beyond SDPA's, and `TypeError` for one
    that is not a tensor.
    """
    asked.require_causal(causal)
    if scale is not None and scale.__class__ is not float:
        if not _is_compiling():
            scale = asked.number("scale", scale)
        elif isinstance(scale, Tensor):
            scale = scale.item()
    if softcap.__class__ is not float:
        softcap = asked.cap(softcap)
    if window is not None:
        window = closed(window)
    others = window is not None or sinks is not None or alibi_slopes is not None or bias is not None
    others = others or seqused_k is not None or softcap != 0
    if dropout_p:
        beyond = others or return_lse or causal != "upper_left"
        return dropout.attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, out, strict, beyond
        )
    if attn_mask is not None:
        beyond = others or return_lse or causal != "upper_left"
        if not beyond and (reason := attn_masks.why_only_torch(attn_mask, query, key, is_causal, enable_gqa)):
            return attn_masks.masked(query, key, value, attn_mask, is_causal, scale, enable_gqa, out, strict, reason)
        if not _is_compiling():  # what stands for no causal mask beside another one would pass unseen
            asked.require_flags(is_causal=is_causal, enable_gqa=enable_gqa)
        is_causal, causal, bias = attn_masks.said_by(attn_mask, query, key, is_causal, causal, bias)
        others = others or bias is not None
    if others:
        if not _is_compiling():
            asked.require_flags(is_causal=is_causal, enable_gqa=enable_gqa)
        variant = Variant(window, softcap, sinks, alibi_slopes, bias, seqused_k)
        return varied.attention(
            query, key, value, variant, is_causal, scale, enable_gqa, causal, return_lse, out, strict
        )
    if _is_compiling():
        from evoattn.ops.traced import traced  # its imports take a second, which whoever compiles has spent

        return traced(query, key, value, is_causal, scale, enable_gqa, causal, return_lse, out, strict)
    if not is_ordinary(query, key, value):
        asked.require_flags(is_causal=is_causal, enable_gqa=enable_gqa)
        if is_fake(query):
            from evoattn.ops.traced import traced

            return traced(query, key, value, is_causal, scale, enable_gqa, causal, return_lse, out, strict)
        return _watched(query, key, value, is_causal, scale, enable_gqa, causal, return_lse, out, strict)
    if is_causal.__class__ is not bool or enable_gqa.__class__ is not bool:
        asked.require_flags(is_causal=is_causal, enable_gqa=enable_gqa)
    runtime = current.runtime()
    if capture.thread.shapes:
        with capture.call(query, key, value, is_causal, causal, enable_gqa, return_lse):
            return run(runtime, query, key, value, is_causal, scale, enable_gqa, causal, return_lse, out, strict)
    if out is None and not _has_autocast(runtime.device_type):
        return runtime.attend(query, key, value, is_causal, scale, enable_gqa, causal, return_lse, None, strict)
    return run(runtime, query, key, value, is_causal, scale, enable_gqa, causal, return_lse, out, strict)


def run(
    runtime: Runtime,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal: str,
    return_lse: bool,
    out: Tensor | None,
    strict: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """The call of plain tensors."""
    if torch.is_autocast_enabled(runtime.device_type):
        query, key, value = autocast(runtime.device_type, query, key, value)
    if out is not None:
        require_out(out, query, value)
        if needs_copy(out, query, key, value):
            answer = runtime.attend(query, key, value, is_causal, scale, enable_gqa, causal, return_lse, None, strict)
            return out.copy_(answer) if isinstance(answer, Tensor) else (out.copy_(answer[0]), answer[1])
    return runtime.attend(query, key, value, is_causal, scale, enable_gqa, causal, return_lse, out, strict)


def _watched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal: str,
    return_lse: bool,
    out: Tensor | None,
    strict: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """SDPA for tensor subclasses, modes and transforms: they know what to do with it."""
    if capture.recorders():
        capture.miss(WATCHED)
    if strict:
        require_ordinary(query, key, value)
    if out is not None:
        require_out(out, query, value)
    return fallback.call(query, key, value, is_causal, scale, enable_gqa, causal, return_lse, out)
