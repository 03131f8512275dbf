"""Keys in use and pages in torch's registry, for compiled code: `torch.ops.evoattn.attention_cache`."""

from __future__ import annotations

import torch
from torch import Tensor

from evoattn.ops import current, fallback, varied
from evoattn.ops.asked import out_like
from evoattn.ops.custom_op import TAGS, is_fake, require_no_gradient
from evoattn.ops.runtime import NoKernel
from evoattn.ops.traced import kernels_run_on
from evoattn.ops.variant import Variant

ARGUMENTS = (
    "(Tensor query, Tensor key, Tensor value, Tensor seqused_k, Tensor? block_table, bool is_causal, str causal, "
    "float? scale, int[]? window, float softcap, Tensor? sinks, Tensor? alibi_slopes, "
    "bool finite, bool strict)"
)
_library = torch.library.Library("evoattn", "FRAGMENT")  # type: ignore[no-untyped-call]


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
    finite: bool,
    strict: bool,
) -> Tensor:
    """`evoattn.attention` of keys in use, or of pages, with an answer laid out in memory as `query` is. Raises
    `RuntimeError` where gradients are wanted, and `NoKernel` under `strict` where no kernel serves the call."""
    require_no_gradient(query, key, value, sinks, alibi_slopes)
    sides = None if window is None else (window[0], window[1])
    variant = Variant(sides, softcap, sinks, alibi_slopes, None, seqused_k, block_table, finite)
    out = out_like(query, value)
    gqa = key.size(-3) != query.size(-3)
    runtime = current.runtime()
    done = varied.by_kernel(runtime, query, key, value, variant, is_causal, scale, gqa, causal, False, out)
    if not isinstance(done, str):
        return out
    if strict:
        raise NoKernel(f"No kernel serves this call: {done}.")
    answer, _ = fallback.varied(
        query, key, value, variant, is_causal=is_causal, scale=scale, enable_gqa=gqa, causal=causal, wants_lse=False
    )
    return out.copy_(answer)


def _fake_attention_cache(query: Tensor, key: Tensor, value: Tensor, *others: object) -> Tensor:
    return out_like(query, value)


_library.define(f"attention_cache{ARGUMENTS} -> Tensor", tags=TAGS)  # type: ignore[no-untyped-call]
_library.impl("attention_cache", _attention_cache, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("attention_cache", _fake_attention_cache, "Meta")  # type: ignore[no-untyped-call]
attention_cache_op = torch.ops.evoattn.attention_cache.default


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
    """The op's answer within a trace; None where torch's own code is traced: on devices without kernels, with a bias,
    where gradients are wanted, and for tensor subclasses, modes and transforms."""
    if not (torch.compiler.is_compiling() or is_fake(query)) or variant.seqused is None or variant.bias is not None:
        return None
    if query.device.type != kernels_run_on() or (key.shape[-3] != query.shape[-3] and not enable_gqa):
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value, *variant.tensors)):
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
        variant.finite,
        strict,
    )
    return answer
