"""Packed sequences in torch's registry, for compiled code: `torch.ops.evoattn.attention_varlen`."""

from __future__ import annotations

from torch import Tensor

from evoattn.ops import variant_call
from evoattn.ops.asked import out_like
from evoattn.ops.custom_op import fake_answer, register, require_no_gradient
from evoattn.ops.traced import takes_variant
from evoattn.ops.variant import Variant

ARGUMENTS = (
    "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt "
    "max_seqlen_k, bool causal, float? scale, int[]? window, float softcap, Tensor? sinks, Tensor? alibi_slopes, "
    "bool strict) -> Tensor"
)


def _attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    scale: float | None,
    window: list[int] | None,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    strict: bool,
) -> Tensor:
    """`evoattn.attention_varlen` with an answer laid out in memory as `query` is. Raises `RuntimeError` where gradients
    are wanted, and `NoKernel` under `strict` where no kernel serves the call."""
    require_no_gradient(query, key, value, sinks, alibi_slopes)
    sides = None if window is None else (window[0], window[1])
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    variant = Variant(sides, softcap, sinks, alibi_slopes, starts=starts, longest=longest)
    out = out_like(query, value)
    variant_call.answer(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        variant,
        causal,
        scale,
        True,
        "lower_right",
        False,
        out.transpose(0, 1)[None],
        strict,
        compiled=True,
    )
    return out


attention_varlen_op = register("attention_varlen", ARGUMENTS, _attention_varlen, fake_answer)


def traced(
    query: Tensor, key: Tensor, value: Tensor, variant: Variant, causal: bool, scale: float | None, strict: bool
) -> Tensor | None:
    """The op's answer within a trace; None where torch's own code is traced: see `takes_variant`."""
    if variant.starts is None or not takes_variant(query, key, value, variant):
        return None
    window = None if variant.window is None else list(variant.window)
    answer: Tensor = attention_varlen_op(
        query,
        key,
        value,
        *variant.starts,
        *variant.longest,
        causal,
        scale,
        window,
        variant.softcap,
        variant.sinks,
        variant.slopes,
        strict,
    )
    return answer
