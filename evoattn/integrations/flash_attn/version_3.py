"""FlashAttention 3's functions: its `flash_attn_interface`, with the same names, order of arguments, defaults, shapes
and results.

https://github.com/Dao-AILab/flash-attention/blob/main/hopper/flash_attn_interface.py says what each argument means.
Beside its arguments there are, by name, those that other versions have: `alibi_slopes` and `dropout_p` of
FlashAttention 2, `block_table` for `page_table`, and sinks as `s_aux` (vLLM) or `learnable_sink` (FlashAttention 4).

`num_splits`, `pack_gqa`, `sm_margin` and `scheduler_metadata` are hints that change no number: evoattn chooses kernels
itself, and its answers are the same bits at each call; `deterministic` asks for that of gradients. The log-sum-exp of a
query that sees no key is -inf."""

from typing import Any

import torch
from torch import Tensor

from evoattn.integrations.flash_attn import eight_bits
from evoattn.integrations.flash_attn.cache import Cache, append_and_attend, attend, attend_packed, of_batch
from evoattn.integrations.flash_attn.columns import side_by_side, with_values
from evoattn.integrations.flash_attn.options import Options, only_one, refuse_fp8, require_of_each, window_of
from evoattn.integrations.flash_attn.rotary import rotated
from evoattn.integrations.flash_attn.sequences import Keys, Queries, over_rows
from evoattn.ops.beside import Rotary, appended, merged
from evoattn.ops.call import Answer
from evoattn.ops.given import is_eight_bits, require_dims, require_tensors, whole

NUMBERS_AT_ONCE = 1 << 26
"""Of products that are summed: 256 MiB, where one batch of all parts is not more."""
NOWHERE = 1 << 30
"""A place behind every cache and every table of angles."""


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Answer:
    """q `[batch, seqlen_q, heads, head_dim]`, k and v `[batch, seqlen_k, kv_heads, head_dim]`. With `return_attn_probs`
    the log-sum-exp `[batch, heads, seqlen_q]` comes too. Gradients are those of `evoattn.attention`. Tensors of
    float8_e4m3fn go to `evoattn.attention_fp8`, and the answer is bfloat16."""
    require_dims(4, "four dimensions, [batch, seqlen, heads, head_dim]", q=q, k=k, v=v)
    eight = eight_bits.takes(q) and qv is None
    if not eight:
        refuse_fp8(q, q_descale, k_descale, v_descale)
    options = Options(
        softmax_scale, bool(causal), window_of(window_size), softcap or 0.0, attention_chunk or 0, alibi_slopes,
        only_one(s_aux=s_aux, learnable_sink=learnable_sink), dropout_p, return_attn_probs, deterministic,
    )  # fmt: skip
    if eight:
        return eight_bits.attend(q, k, v, options, (q_descale, k_descale, v_descale))
    if qv is not None:
        q, k = with_values(qv, q, k, v), side_by_side(v, k)
        v = k[..., : v.shape[-1]]
    return of_batch(q, k, v, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    dropout_p: float = 0.0,
    alibi_slopes: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    page_table: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Answer:
    """q `[total_q, heads, head_dim]`, k and v `[total_k, kv_heads, head_dim]`, or caches with four dimensions: of pages
    with `page_table`, else one row for each sequence; their lengths are `seqused_k`, or say `cu_seqlens_k`. With
    `return_attn_probs` the log-sum-exp `[heads, total_q]` comes too. Rows of q that are no queries get 0.
    Tensors of float8_e4m3fn, with descale factors `[sequences, kv_heads]`, have an answer of bfloat16."""
    require_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    eight = eight_bits.takes(q) and qv is None
    if not eight:
        refuse_fp8(q, q_descale, k_descale, v_descale)
    options = Options(
        softmax_scale, bool(causal), window_of(window_size), softcap or 0.0, attention_chunk or 0, alibi_slopes,
        only_one(s_aux=s_aux, learnable_sink=learnable_sink), dropout_p, return_attn_probs, deterministic,
        **(eight_bits.scales(q, q_descale, k_descale, v_descale) if eight else {}),
    )  # fmt: skip
    queries = Queries(cu_seqlens_q, whole("max_seqlen_q", max_seqlen_q), seqused_q)
    if k.dim() == 4:
        if seqused_k is None and cu_seqlens_k is not None:
            seqused_k = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        table = only_one(page_table=page_table, block_table=block_table)
        return over_cache(q, queries, Cache(k, v, len(cu_seqlens_q) - 1, seqused_k, table), options, qv)
    if cu_seqlens_k is None:
        raise ValueError("cu_seqlens_k is needed: only a cache, of four dimensions, has seqused_k alone.")
    require_dims(3, "three dimensions, [total, heads, head_dim]", q=q, k=k, v=v)
    require_dims(1, "one dimension", cu_seqlens_k=cu_seqlens_k)
    if qv is not None:
        q, k = with_values(qv, q, k, v), side_by_side(v, k)
        v = k[..., : v.shape[-1]]
    keys = Keys(cu_seqlens_k[:-1], whole("max_seqlen_k", max_seqlen_k), seqused_k, cu_seqlens_k)
    return over_rows(q, k, v, queries, keys, options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Answer:
    """qkv `[batch, seqlen, 3, heads, head_dim]`, or `[batch, seqlen, heads + 2 · kv_heads, head_dim]` with
    `num_heads_q`."""
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(dim=-3)
    elif num_heads_q is None:
        raise ValueError("qkv of four dimensions needs num_heads_q, the number of query heads.")
    else:
        kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, kv_heads, kv_heads], dim=-2)
    refuse_fp8(q, q_descale, k_descale, v_descale)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, window_size=window_size, attention_chunk=attention_chunk, softcap=softcap,
        return_attn_probs=return_attn_probs, deterministic=deterministic,
    )  # fmt: skip


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    alibi_slopes: Tensor | None = None,
    s_aux: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Any:
    """q `[batch, seqlen_q, heads, head_dim]`, or packed with `cu_seqlens_q` and `max_seqlen_q`; caches `[batch_cache,
    length, kv_heads, head_dim]`, or with `page_table` `[pages, page, kv_heads, head_dim]`. New keys k and v are rotated
    and written into the cache, behind `cache_seqlens`, before attention: with the queries' rotation in one launch of
    the family append_kv, where neither q nor k is packed and neither `rotary_seqlens` nor `cache_batch_idx` is given.
    There are no gradients, as in FlashAttention.

    A cache may be of float8_e4m3fn, float8_e5m2 or int8 beside q of 16 bits, or of float8_e4m3fn beside such a q.
    `q_descale`, `k_descale` and `v_descale`, float32 `[batch, kv_heads]`, are what their numbers are multiplied by, 1
    unless given. New keys are the caller's to write.

    With `return_softmax_lse` four things come, as from FlashAttention 3: output, log-sum-exp, and two tensors without
    elements where it has the results of splits.

    Raises `TypeError` for a q or a cache that is no tensor, `ValueError` for what does not fit."""
    require_tensors(q=q)
    padded = {"q": q} if cu_seqlens_q is None else {}
    require_dims(4, "four dimensions", k_cache=k_cache, v_cache=v_cache, **padded)
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin go together; one of them is missing.")
    eight = eight_bits.takes(q) and k is qv is rotary_cos is None
    if not eight:
        refuse_fp8(q, q_descale)
    if is_eight_bits(k_cache) and (k is not None or qv is not None):
        raise ValueError("a cache of 8 bits takes neither qv nor new keys: quantise these, and write them before.")
    own = dict(k_scale=k_descale, v_scale=v_descale)
    options = Options(
        softmax_scale, bool(causal), window_of(window_size), softcap or 0.0, attention_chunk or 0, alibi_slopes,
        only_one(s_aux=s_aux, learnable_sink=learnable_sink), return_lse=return_softmax_lse,
        **(eight_bits.scales(q, q_descale, k_descale, v_descale) if eight else own),
    )  # fmt: skip
    table = only_one(page_table=page_table, block_table=block_table)
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    require_of_each(
        batch, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        rotary_seqlens=rotary_seqlens,
    )  # fmt: skip
    if table is not None and cache_batch_idx is not None:
        table, cache_batch_idx = table[cache_batch_idx.long()], None
    cache = Cache(k_cache, v_cache, batch, cache_seqlens, table, cache_batch_idx, cache_leftpad)
    start = cache.lengths if rotary_seqlens is None else rotary_seqlens
    rotary = None if rotary_cos is None or rotary_sin is None else (rotary_cos, rotary_sin, rotary_interleaved)
    if k is not None and (v is None or cache_seqlens is None):
        raise ValueError("new keys k need new values v, and cache_seqlens, behind which they are written.")
    plain = rotary_seqlens is None and cu_seqlens_q is None and cu_seqlens_k_new is None and cache_batch_idx is None
    if k is None or v is None or cache_seqlens is None:
        q = _turned_queries(q, cu_seqlens_q, start, rotary, options)
    else:
        both = append_and_attend(q, (k, v), cache, options) if plain and rotary is None and qv is None else None
        if both is not None:
            return _four(both, q)
        turned = appended(q, (k, v), cache, rotary, options.is_local) if plain else None
        if turned is None:
            turned = _turned_queries(q, cu_seqlens_q, start, rotary, options)
            sequence, offset = _rows_of(k, cu_seqlens_k_new)
            if rotary is not None:
                k = rotated(k, *rotary[:2], (start[sequence] + offset).view(k.shape[:-2]), rotary_interleaved)
            new_keys, new_values = (t.reshape(-1, *t.shape[-2:]) for t in (k, v))
            cache.append(new_keys, new_values, sequence, cache_seqlens[sequence] + offset)
        q, added = turned, k.shape[1] if cu_seqlens_k_new is None else cu_seqlens_k_new[1:] - cu_seqlens_k_new[:-1]
        cache = Cache(k_cache, v_cache, batch, cache_seqlens + added, table, cache_batch_idx, cache_leftpad)
    queries = None
    if cu_seqlens_q is not None:
        if max_seqlen_q is None:
            raise ValueError("packed queries need max_seqlen_q, at least the longest length.")
        queries = Queries(cu_seqlens_q, whole("max_seqlen_q", max_seqlen_q))
    return _four(over_cache(q, queries, cache, options, qv), q)


def _four(answer: Answer, q: Tensor) -> Any:
    """The answer as FlashAttention 3 gives it."""
    return answer if isinstance(answer, Tensor) else (*answer, q.new_empty(0), q.new_empty(0))


def _turned_queries(q: Tensor, bounds: Tensor | None, start: Tensor, rotary: Rotary | None, options: Options) -> Tensor:
    """Queries turned by the angles of their positions behind `start` `[batch]`."""
    if rotary is None:
        return q
    sequence, offset = _rows_of(q, bounds)
    positions = start[sequence] + (offset if options.is_local else 0)
    return rotated(q, *rotary[:2], positions.view(q.shape[:-2]), rotary[2])


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """One answer of those over parts of the keys: out_partial `[parts, …, heads, head_dim]`, lse_partial `[parts, …,
    heads]`, both float32; the output, of `out_dtype` or float32, and the log-sum-exp. A part whose log-sum-exp is -inf
    counts for nothing, whatever its output holds. Parts of 16 bits are taken, too. By a kernel where one may run."""
    require_tensors(out_partial=out_partial, lse_partial=lse_partial)
    if lse_partial.dim() < 2 or lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"lse_partial {list(lse_partial.shape)} must be [parts, …, heads], out_partial {list(out_partial.shape)} "
            "without its last dimension."
        )
    if out is None:
        out = torch.empty_like(out_partial[0], dtype=out_dtype)
    lse = torch.empty_like(lse_partial[0])
    if merged(out_partial, lse_partial, out, lse):
        return out, lse
    lse = torch.logsumexp(lse_partial, dim=0)
    weights = torch.exp(lse_partial - lse).masked_fill(torch.isneginf(lse_partial), 0)[..., None]
    of_one = max(1, out_partial[:, :1].numel())
    for part in range(0, out.shape[0], step := max(1, NUMBERS_AT_ONCE // of_one)):
        rows = slice(part, part + step)
        some = weights[:, rows]
        out[rows] = (out_partial[:, rows] * some).masked_fill_(some == 0, 0).sum(0)
    return out, lse


def get_scheduler_metadata(*_arguments: Any, cache_seqlens: Tensor | None = None, **_others: Any) -> Tensor:
    """An empty tensor: there is nothing to plan, as kernels read lengths on the device."""
    given = [one for one in (*_arguments, cache_seqlens) if isinstance(one, Tensor)]
    return torch.empty(0, dtype=torch.int32, device=given[0].device if given else None)


def over_cache(q: Tensor, queries: Queries | None, cache: Cache, options: Options, qv: Tensor | None) -> Answer:
    """Attention of padded or packed queries over a cache; `qv` `[…, heads, head_dim of V]` are queries of V."""
    if options.dropout_p:
        raise ValueError("dropout_p goes without a cache: nobody trains on one.")
    if qv is not None:
        q, cache = with_values(qv, q, cache.k, cache.v), cache.joined()
    return attend(q, cache, options) if queries is None else attend_packed(q, queries, cache, options)


def _rows_of(tensor: Tensor, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """(sequence, place in it) of each row of `[batch, rows, …]`, or with `bounds` of packed rows. The place of rows
    behind the last sequence is `NOWHERE`."""
    if bounds is None:
        batch, rows = tensor.shape[:2]
        numbers = torch.arange(batch * rows, device=tensor.device)
        if rows == 1:
            return numbers, torch.zeros_like(numbers)
        return torch.div(numbers, max(1, rows), rounding_mode="floor"), numbers % max(1, rows)
    numbers, ends = torch.arange(tensor.shape[0], device=tensor.device), bounds[1:].long()
    sequence = torch.bucketize(numbers, ends, right=True)
    within = sequence.clamp(max=len(ends) - 1)
    return within, (numbers - bounds[within]).masked_fill(sequence >= len(ends), NOWHERE)
