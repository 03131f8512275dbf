"""Keys in use and pages in torch's registry, for compiled code: `torch.ops.evoattn.attention_cache`."""

from __future__ import annotations

from torch import Tensor

from evoattn.ops import variant_call
from evoattn.ops.asked import out_like
from evoattn.ops.custom_op import fake_answer, register, require_no_gradient
from evoattn.ops.traced import takes_variant
from evoattn.ops.variant import Variant

ARGUMENTS = (
    "(Tensor query, Tensor key, Tensor value, Tensor seqused_k, Tensor? block_table, bool is_causal, str causal, "
    "float? scale, int[]? window, float softcap, Tensor? sinks, Tensor? alibi_slopes, "
    "Tensor? bias, bool finite, bool strict) -> Tensor"
)


def _attention_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seqused_k: Tensor,
    block_table: Tensor | None,
    is_causal: bool,
    causal: str,
    scale: float | None,
    window: list[int] | None,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    bias: Tensor | None,
    finite: bool,
    strict: bool,
) -> Tensor:
    """`evoattn.attention` of keys in use, or of pages, with an answer laid out in memory as `query` is. Raises
    `RuntimeError` where gradients are wanted, and `NoKernel` under `strict` where no kernel serves the call."""
    require_no_gradient(query, key, value, sinks, alibi_slopes, bias)
    sides = None if window is None else (window[0], window[1])
    variant = Variant(sides, softcap, sinks, alibi_slopes, bias, seqused_k, block_table, finite)
    out = out_like(query, value)
    gqa = key.size(-3) != query.size(-3)
    variant_call.answer(query, key, value, variant, is_causal, scale, gqa, causal, False, out, strict, compiled=True)
    return out


attention_cache_op = register("attention_cache", ARGUMENTS, _attention_cache, fake_answer)


def traced(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    variant: Variant,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal: str,
    strict: bool,
) -> Tensor | None:
    """The op's answer within a trace; None where torch's own code is traced, see `takes_variant`."""
    if variant.seqused is None or not takes_variant(query, key, value, variant):
        return None
    if key.shape[-3] != query.shape[-3] and not enable_gqa:
        return None
    window = None if variant.window is None else list(variant.window)
    answer: Tensor = attention_cache_op(
        query,
        key,
        value,
        variant.seqused,
        variant.table,
        is_causal,
        causal,
        scale,
        window,
        variant.softcap,
        variant.sinks,
        variant.slopes,
        variant.bias,
        variant.finite,
        strict,
    )
    return answer
