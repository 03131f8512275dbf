"""`evoattn.attention_paged`: attention over a cache of pages, as serving engines keep their keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from evoattn.ops import asked, varied
from evoattn.ops.given_out import require_out
from evoattn.ops.variant import Variant, closed


def attention_paged(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    out: Tensor | None = None,
    strict: bool = False,
) -> Tensor:
    """Attention of each batch's queries over its own sequence of keys, which lies in pages of a cache.

    Shapes are those of `flash_attn_with_kvcache`: query `[batch, seqlen_q, heads, head_dim]`, k_cache and v_cache
    `[pages, page, kv_heads, head_dim]`, block_table int32 `[batch, most_pages]` with each sequence's pages in their
    order, seqused_k int32 `[batch]` with its number of keys. Entries of the table and rows of pages behind the last key
    may hold anything. A sequence without keys has the output 0.

    With `causal`, and in `window`, query i counts from key i + seqused_k - seqlen_q: the queries are the last ones of
    the sequence, whose own keys are in the cache already. `scale`, `window`, `softcap`, `sinks`, `alibi_slopes`, `out`
    and `strict` are those of `evoattn.attention`. The answer has query's shape, dtype and memory layout.

    The best known kernel runs where pages have 16, 32, 64, 128 or 256 keys; else torch gathers the pages and computes
    the same. Nothing waits for the device. Raises `ValueError` for arguments that do not fit, `TypeError` for ones of
    the wrong type, and `NoKernel` under `strict` where no kernel serves the call.
    """
    if not torch.compiler.is_compiling():
        scale = None if scale is None else asked.number("scale", scale)
        asked.require_flags(causal=causal)
    softcap = asked.cap(softcap)
    if block_table is None:
        raise TypeError("block_table must be a tensor, not NoneType.")
    for name, tensor in (("query", query), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have four dimensions, not {list(tensor.shape)}.")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"k_cache and v_cache must have the same pages and heads, not {list(k_cache.shape)} and "
            f"{list(v_cache.shape)}."
        )
    if 0 in k_cache.shape:
        raise ValueError(f"k_cache must not be empty, as {list(k_cache.shape)} is.")
    if k_cache.shape[3] != query.shape[3] or query.shape[2] % k_cache.shape[2]:
        raise ValueError(
            f"query {list(query.shape)} and k_cache {list(k_cache.shape)} do not fit: the last dimension is one "
            "head_dim, and query's heads, its third dimension, are a multiple of the K/V heads, k_cache's third."
        )
    if out is not None:
        require_out(out, query, v_cache)
    answer = varied.attention(
        query.transpose(1, 2),
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        Variant(closed(window), softcap, sinks, alibi_slopes, None, seqused_k, block_table),
        causal,
        scale,
        True,
        "lower_right",
        False,
        None if out is None else out.transpose(1, 2),
        strict,
    )
    assert isinstance(answer, Tensor)
    return answer.transpose(1, 2) if out is None else out
