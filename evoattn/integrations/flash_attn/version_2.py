"""FlashAttention 2's functions: its `flash_attn.flash_attn_interface`, with the same names, order of arguments,
defaults and shapes.

https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/flash_attn_interface.py says what each argument means.
`return_attn_probs` gives three things, as there: output, log-sum-exp and a tensor without elements; FlashAttention has
probabilities in it where there is dropout, and evoattn refuses the two together. The log-sum-exp of a query that sees
no key is -inf, where FlashAttention 2 has +inf. `deterministic` is of gradients: answers have the same bits anyway."""

from typing import Any

from torch import Tensor

from evoattn.integrations.flash_attn import version_3
from evoattn.ops.call import Answer


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q `[batch, seqlen_q, heads, head_dim]`, k and v `[batch, seqlen_k, kv_heads, head_dim]`."""
    answer = version_3.flash_attn_func(
        q, k, v, softmax_scale, causal, window_size=window_size, softcap=softcap, return_attn_probs=return_attn_probs,
        dropout_p=dropout_p, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    return _as_here(answer)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """kv `[batch, seqlen_k, 2, kv_heads, head_dim]`."""
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = kv.unbind(dim=2)
    return flash_attn_func(q, k, v, *given)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """qkv `[batch, seqlen, 3, heads, head_dim]`."""
    given = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = qkv.unbind(dim=2)
    return flash_attn_func(q, k, v, *given)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """q `[total_q, heads, head_dim]`, k and v `[total_k, kv_heads, head_dim]`, or with `block_table` `[sequences, most
    pages]` caches `[pages, page, kv_heads, head_dim]` of pages of any size."""
    answer = version_3.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, return_attn_probs=return_attn_probs, dropout_p=dropout_p,
        alibi_slopes=alibi_slopes, page_table=block_table, deterministic=deterministic,
    )  # fmt: skip
    return _as_here(answer)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """kv `[total_k, 2, kv_heads, head_dim]`."""
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    rest: Any = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = kv.unbind(dim=1)
    return flash_attn_varlen_func(q, k, v, *lengths, *rest)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """qkv `[total, 3, heads, head_dim]`."""
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    rest: Any = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = qkv.unbind(dim=1)
    return flash_attn_varlen_func(q, k, v, *lengths, *rest)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """As `version_3.flash_attn_with_kvcache`; with `return_softmax_lse` output and log-sum-exp."""
    answer = version_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, page_table=block_table,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return answer if isinstance(answer, Tensor) else answer[:2]


def _as_here(answer: Answer) -> Any:
    """Output alone, or output, log-sum-exp and what there is of probabilities."""
    return answer if isinstance(answer, Tensor) else (*answer, answer[0].new_empty(0))
