"""The functions of the op: scaled dot-product attention by the best known kernel, or by torch where there is none."""

from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from evoattn.model.mask import CAUSAL_LOWER_RIGHT, CAUSAL_UPPER_LEFT, FULL
from evoattn.ops import shapes, torch_answer
from evoattn.ops.arguments import (
    KV_DTYPES,
    SINKS,
    WATCHED,
    Causal,
    Score,
    aligned_mask_of,
    autocast_dtype,
    cap_of,
    has_autocast,
    is_ordinary,
    mask_of,
    needs_copy,
    require_flags,
    scale_of,
    window_of,
)
from evoattn.ops.call import (
    DROPOUT,
    DROPOUT_ALONE,
    KV_QUERIES,
    Answer,
    Call,
    require_out,
    terms_of,
    with_tables,
)
from evoattn.ops.given import (
    Scale,
    call_of,
    causal_kind,
    dequantised,
    of_pages,
    of_sequences,
    require_dims,
    why_only_torch,
    with_mask,
    with_scales,
)
from evoattn.ops.packed import Packed
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.torch_answer import PROMISE, refuse

_is_compiling = torch.compiler.is_compiling
_any_autocast = torch._C._is_any_autocast_enabled


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
    causal: Causal = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_k: Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    score: Score | None = None,
    return_lse: Literal[False] = False,
    out: Tensor | None = None,
    strict: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
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
    causal: Causal = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_k: Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    score: Score | None = None,
    return_lse: Literal[True],
    out: Tensor | None = None,
    strict: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
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
    causal: Causal = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    seqused_k: Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    score: Score | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    strict: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
) -> Answer:
    """softmax(query keyᵀ · scale + mask) value, as `torch.nn.functional.scaled_dot_product_attention` computes it.

    Shapes: query `[batch, heads, seqlen_q, head_dim]`, key and value `[batch, kv_heads, seqlen_k, head_dim]`, of any
    strides; fewer K/V heads need `enable_gqa`. `scale` is 1/sqrt(head_dim) unless given. SDPA's `is_causal` shows query
    i the keys j <= i. `causal` says the mask alone: True or "lower_right" shows it the keys j <= i + seqlen_k -
    seqlen_q, as FlashAttention's `causal` does, "upper_left" what `is_causal` shows. A query that sees no key has the
    output 0.

    Beyond SDPA, in this order: `softcap` makes a scaled score s `softcap · tanh(s / softcap)`, and 0 or None leaves it
    as it is; `alibi_slopes` `[heads]` takes slope · |i + offset - j| from it; `bias`, broadcastable to `[batch, heads,
    seqlen_q, seqlen_k]` and of query's dtype or float32, is added; `score` is an expression of what came of it, and of
    tables (see `evoattn.Score`); `window` `(past, ahead)` shows the keys from i +
    offset - past to i + offset + ahead alone, -1 leaving a side open; `sinks` `[heads]` are scores without a value that
    take part in the sum. The offset is that of the causal mask, without one seqlen_k - seqlen_q, as in FlashAttention.
    `seqused_k` `[batch]`, int32 on the device, says how many keys of each batch there are: the others may hold
    anything, and seqlen_k is then that number.
    Keys and values may be float8_e4m3fn, float8_e5m2 or int8 beside a query of 16 bits: `k_scale` and `v_scale` are
    what they are multiplied by, a number, or float32 `[kv_heads]`, `[batch, kv_heads]` or `[batch, kv_heads,
    seqlen_k]`, not negative, 1 unless given.
    `attn_mask` is SDPA's: torch's causal masks (`torch.nn.attention.bias`) are known as such, any other is a bias.
    `dropout_p` is SDPA's too, and goes with SDPA's own arguments alone.

    The answer has query's shape, dtype and order of dimensions in memory, but value's head_dim, which may be another;
    `out` takes it instead of a new tensor. A value that is the first columns of key, as `kv[..., :512]` in DeepSeek's
    latent attention, is read once by kernels that know it.
    `return_lse` adds the natural logarithm of each query's sum of exponentials, `[batch, heads, seqlen_q]` float32,
    -inf where it sees no key.

    The best known kernel for the GPU and the problem runs on torch's current stream; the first use of a kernel
    compiles or loads it. Where gradients are wanted there has to be one for each pass; `deterministic` has theirs be of
    the same bits in every run. What no kernel serves (dropout, other devices and dtypes, unaligned strides …) torch
    computes. `explain` says which it is, and `strict` raises `NoKernel` instead. So does `batch_invariant`, with which
    the bits of a row depend on its own query, keys and values alone (docs/serves.md, "The same bits").

    Raises what SDPA raises for shapes that do not fit, `ValueError` for a wrong `causal` or one that `is_causal`
    contradicts, a wrong `out` or argument beyond SDPA's, and `TypeError` for one of the wrong type."""
    if causal is None and is_causal.__class__ is bool:
        mask = CAUSAL_UPPER_LEFT if is_causal else FULL
    else:
        mask = mask_of(causal, is_causal)
    if enable_gqa.__class__ is not bool:
        require_flags(enable_gqa=enable_gqa)
    if scale is not None:
        scale = scale_of(scale)
    if softcap.__class__ is not float or softcap != 0:
        softcap = cap_of(softcap)
    if window is not None:
        window = window_of(window)
    terms: tuple[Tensor | None, ...] = ()
    if sinks is not None or alibi_slopes is not None or bias is not None or seqused_k is not None:
        terms = (sinks, alibi_slopes, bias, seqused_k, None, None, None, None, None)
    call = Call(query, key, value, mask, scale, enable_gqa, window, softcap, terms, return_lse, out, strict)
    if deterministic:
        call.deterministic = True
    if batch_invariant:
        call.batch_invariant = True
    if k_scale is not None or v_scale is not None or getattr(key, "dtype", None) in KV_DTYPES:
        call = with_scales(call, k_scale, v_scale)
    if score is not None:
        call.score, call.terms = score, with_tables(call.terms, score)
    if dropout_p or attn_mask is not None:
        return _with_sdpa_s_own(call, attn_mask, dropout_p, causal is not None)
    return attend(call)


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    scale: float | None = None,
    causal: Causal = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    strict: bool = False,
    deterministic: bool = False,
    batch_invariant: bool = False,
) -> Answer:
    """Attention of each sequence's queries over its own keys, which lie packed end to end, as in flash-attention's
    `flash_attn_varlen_func`.

    Shapes: query `[total_q, heads, head_dim]`, key and value `[total_k, kv_heads, head_dim]`, of any strides; heads
    are a multiple of kv_heads. cu_seqlens_q and cu_seqlens_k, int32 `[sequences + 1]` on the device, say where each
    sequence begins and the last one ends; max_seqlen_q and max_seqlen_k, at least the longest lengths, are numbers; a
    tensor's value is waited for. A sequence may have no queries, or no keys; a query that sees no key has the output 0.
    Rows in front of the first sequence or behind the last one have answers and gradients that mean nothing, and are
    counted: there are at most as many rows as sequences of the longest lengths have.

    The other arguments are those of `evoattn.attention`, `k_scale` and `v_scale` of each key `[total_k, kv_heads]`.
    Query may be of float8_e4m3fn beside such keys and values: `q_scale` is what its numbers are multiplied by, a number
    or `[sequences, kv_heads]`, no scale is of each key then, and the answer is bfloat16, as of `attention_fp8`.
    Under `causal`, which is True or "lower_right", in `window` and of `alibi_slopes`, query i of a sequence counts
    from its key i + keys - queries, so that the last query sees the last key. The answer has query's shape, dtype
    and memory layout; `return_lse` adds the natural logarithm of each query's sum of exponentials, `[heads,
    total_q]` float32.

    The best known kernel runs; else torch's `varlen_attn`, or, where that lacks what is asked, SDPA over the sequences
    padded to their longest. Lengths are not read on the host, and nothing waits for the device. Raises `ValueError`
    for arguments that do not fit, `TypeError` for ones of the wrong type, and `NoKernel` under `strict` where no kernel
    serves the call."""
    call = Call(
        **of_sequences(query, key, value, (max_seqlen_q, max_seqlen_k), out),
        mask=aligned_mask_of(causal),
        scale=scale_of(scale),
        window=window_of(window),
        softcap=cap_of(softcap),
        terms=terms_of(sinks=sinks, alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k),
        return_lse=return_lse,
        strict=strict,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
    )
    call = with_scales(call, k_scale, v_scale, q_scale)
    return _in_caller_s_order(call, out)


def attention_paged(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    *,
    scale: float | None = None,
    causal: Causal = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_scale: Scale = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    strict: bool = False,
    batch_invariant: bool = False,
) -> Answer:
    """Attention of each batch's queries over its own sequence of keys, which lies in pages of a cache.

    Shapes are those of `flash_attn_with_kvcache`: query `[batch, seqlen_q, heads, head_dim]`, k_cache and v_cache
    `[pages, page, kv_heads, head_dim]`, block_table int32 `[batch, most_pages]` with each sequence's pages in their
    order, seqused_k int32 `[batch]` with its number of keys. Entries of the table and rows of pages behind the last key
    may hold anything. A sequence without keys has the output 0. Of latent attention k_cache may hold the rotary columns
    of keys alone, whose first columns are v_cache's then: the head_dims of both make query's.

    The other arguments are those of `evoattn.attention`, `k_scale` and `v_scale` of each key `[pages, page,
    kv_heads]`, and `q_scale` as of `attention_varlen`. Under `causal`, which is True or "lower_right", in `window` and
    of `alibi_slopes`, query i counts from key i + seqused_k - seqlen_q: the queries are the last ones of the sequence,
    whose own keys are in the cache already. The answer has query's shape, dtype and memory layout; `return_lse` adds
    the natural logarithm of each query's sum of exponentials, `[batch, heads, seqlen_q]` float32.

    The best known kernel runs where pages have a power of two of keys up to 512; else torch gathers them and computes
    the same. Nothing waits for the device. Raises `ValueError` for arguments that do not fit, `TypeError` for ones of
    the wrong type, and `NoKernel` under `strict` where no kernel serves the call."""
    if block_table is None:
        raise TypeError("block_table must be a tensor, not NoneType.")
    call = Call(
        **of_pages(query, k_cache, v_cache, out),
        mask=aligned_mask_of(causal),
        scale=scale_of(scale),
        window=window_of(window),
        softcap=cap_of(softcap),
        terms=terms_of(sinks=sinks, alibi_slopes=alibi_slopes, seqused_k=seqused_k, block_table=block_table),
        return_lse=return_lse,
        strict=strict,
        batch_invariant=batch_invariant,
    )
    call = with_scales(call, k_scale, v_scale, q_scale)
    return _in_caller_s_order(call, out)


def attention_mixed(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    scale: float | None = None,
    causal: Causal = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: Scale = None,
    v_scale: Scale = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    strict: bool = False,
    batch_invariant: bool = False,
) -> Answer:
    """Attention of packed queries, each sequence over its own keys in pages of a cache: chunks of prompts, drafts and
    single tokens together, as in `flash_attn_varlen_func` with `block_table` and `seqused_k`.

    Shapes: query `[total_q, heads, head_dim]`, k_cache and v_cache `[pages, page, kv_heads, head_dim]`, block_table
    int32 `[sequences, most_pages]`, seqused_k int32 `[sequences]`, cu_seqlens_q int32 `[sequences + 1]`, all on the
    device. max_seqlen_q is a number, at least the longest sequence's queries; more of one are cut off. A sequence may
    have no queries or no keys; a query that sees no key has the output 0. Rows of query in front of the first sequence
    or behind the last one have answers that mean nothing.

    The other arguments are those of `evoattn.attention_paged`. Under `causal`, in `window` and of `alibi_slopes` query
    i of a sequence counts from its key i + seqused_k - queries. The answer has query's shape, dtype and memory layout;
    `return_lse` adds the natural logarithm of each query's sum of exponentials, `[heads, total_q]` float32.

    Nothing waits for the device, lengths are read there, and one plan serves all batches whose sizes round to the same:
    a call may be captured in a CUDA graph after one like it has run. Raises `ValueError` for arguments that do not fit,
    `TypeError` for ones of the wrong type, and `NoKernel` under `strict` where no kernel serves the call."""
    if not isinstance(query, Tensor) or query.dim() != 3:
        require_dims(3, "three dimensions, [total_q, heads, head_dim]", query=query)
    if k_scale is None and v_scale is None and max_seqlen_q.__class__ is int and cu_seqlens_q is not None:
        terms = (sinks, alibi_slopes, None, seqused_k, block_table, cu_seqlens_q, None, None, None)
        said = (aligned_mask_of(causal), scale_of(scale), return_lse, window_of(window), cap_of(softcap), None)
        tensors = query, k_cache, v_cache, out
        if (again := _again(tensors, terms, max_seqlen_q, (*said, batch_invariant or PROMISE.everywhere))) is not None:
            return again
    require_dims(4, "four dimensions, [pages, page, kv_heads, head_dim]", k_cache=k_cache, v_cache=v_cache)
    require_dims(2, "two dimensions, [sequences, most_pages]", block_table=block_table)
    require_dims(1, "one dimension", seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q)
    words: dict[str, Any] = {
        "block_table": block_table, "seqused_k": seqused_k, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q,
        "scale": scale, "causal": causal, "window": window, "softcap": softcap, "sinks": sinks, "strict": strict,
        "alibi_slopes": alibi_slopes, "k_scale": k_scale, "v_scale": v_scale, "return_lse": return_lse,
        "batch_invariant": batch_invariant, "out": None if out is None else out[None],
    }  # fmt: skip
    call = call_of(query, k_cache, v_cache, words)
    return _in_caller_s_order(call, out)


def _in_caller_s_order(call: Call, out: Tensor | None) -> Answer:
    """The answer to a call of packed sequences or pages; `out` as the caller gave it."""
    answer = call.given_back(attend(call))
    if out is None:
        return answer
    return out if isinstance(answer, Tensor) else (out, answer[1])


def _again(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None],
    terms: tuple[Tensor | None, ...],
    longest: int,
    words: tuple[object, ...],
) -> Answer | None:
    """The answer to packed queries over pages if such were decided before and nothing watches: a `Call` of them, with
    its views and checks, takes as long as all else does. Arguments are those of `Packed`; for what is wrong with them
    None: whoever makes a `Call` says it."""
    query, key, value, out = tensors
    if _is_compiling() or not is_ordinary(query, key, value) or PROMISE.fp8 is not None or shapes.is_recording():
        return None
    try:
        if _any_autocast():
            return None
        if out is not None:  # a kernel would write behind one of fewer rows, and one with gradients is refused
            inputs = (query, key, value, *[term for term in terms if term is not None])
            if out.size(0) != query.size(0) or out.requires_grad or needs_copy(out, *inputs):
                return None
        packed = Packed(tensors, terms, longest, words)
    except (RuntimeError, AttributeError, TypeError, ValueError, IndexError):
        return None
    return current.runtime().again(packed)


def attend(call: Call) -> Answer:
    """The answer to a call, whatever its tensors are; see `attention`."""
    query = call.query
    if call.terms and (others := sinks_apart(call)) is not None:
        return _with_sinks(call, others)
    watched = _is_compiling() or not is_ordinary(query, call.key, call.value)
    if call.q_scaled and (watched or shapes.is_recording()):  # what watches knows calls of 16 bits alone
        refuse(WATCHED, call.strict, call.batch_invariant)
        call = dequantised(call)
    if watched:
        return _of_watched(call)
    runtime = current.runtime()
    if PROMISE.fp8 is not None and (answer := _in_eight_bits(runtime, call)) is not None:
        return answer
    if shapes.is_recording():
        call.require()
        return shapes.recorded_call(call, lambda: run(runtime, call))
    return runtime.attend(call) if call.out is None and not _any_autocast() else run(runtime, call)


def sinks_apart(call: Call) -> Call | None:
    """The call without its sinks, where these are float32 beside a query of 16 bits, autocast's too: kernels would
    round them to that, and a sink of 20 in bfloat16 is up to 6 % off in its weight. None for others."""
    sinks = call.term(SINKS)
    if not isinstance(sinks, Tensor) or sinks.dtype != torch.float32:
        return None
    if not isinstance(query := call.query, Tensor):
        return None
    kind = query.device.type
    if (autocast_dtype(kind, query) if has_autocast(kind) else query.dtype) not in KV_QUERIES:
        return None
    terms = tuple(None if which == SINKS else term for which, term in enumerate(call.terms))
    terms = () if all(term is None for term in terms) else terms
    return replace(call, terms=terms, return_lse=True, out=None)


def _with_sinks(call: Call, others: Call) -> Answer:
    """The answer to a call by that of `sinks_apart`: a sink takes its part of each row's sum. In four launches, five
    with the log-sum-exp; a dozen where gradients are wanted, in which infinities are kept apart."""
    kind = call.query.device.type
    (call.autocast(kind) if has_autocast(kind) else call).require()
    if call.out is not None:
        require_out(call.out, call.query, call.value)
    output, lse = attend(others)
    sinks = call.terms[SINKS]
    assert sinks is not None and isinstance(lse, Tensor)
    if not (_is_compiling() or call.wants_gradients) and is_ordinary(output, lse, sinks):
        share = torch.sigmoid(lse - sinks[:, None]).nan_to_num_(0)  # NaN: no key, and no sink
        output.mul_(share[..., None])
        output = output if call.out is None else call.out.copy_(output)
        return (output, torch.logaddexp(lse, sinks[:, None])) if call.return_lse else output
    least, unseen, none = torch.finfo(torch.float32).min, torch.isneginf(lse), torch.isneginf(sinks[:, None])
    sums, own = lse.masked_fill(unseen, least), sinks[:, None].masked_fill(none, least)  # of two infinities: NaN
    share = torch.sigmoid(sums - own).masked_fill(unseen, 0)
    output = (output * share[..., None]).to(output.dtype)
    output = output if call.out is None else call.out.copy_(output)
    return (output, torch.logaddexp(sums, own).masked_fill(unseen & none, -torch.inf)) if call.return_lse else output


def _in_eight_bits(runtime: Runtime, call: Call) -> Answer | None:
    """The answer in 8 bits, None where the call keeps its own; see `enable`."""
    assert PROMISE.fp8 is not None
    if torch.is_autocast_enabled(runtime.device_type):
        call = call.autocast(runtime.device_type)
    if call.out is not None:
        require_out(call.out, call.query, call.value)
    answer: Answer | None = PROMISE.fp8(runtime, call)
    return answer


def run(runtime: Runtime, call: Call) -> Answer:
    """The call of plain tensors."""
    if torch.is_autocast_enabled(runtime.device_type):
        call = call.autocast(runtime.device_type)
    out = call.out
    if out is None:
        return runtime.attend(call)
    require_out(out, call.query, call.value)
    terms = call.given_terms if call.terms else ()
    if not needs_copy(out, call.query, call.key, call.value, *terms):
        return runtime.attend(call)
    answer = runtime.attend(replace(call, out=None))
    return out.copy_(answer) if isinstance(answer, Tensor) else (out.copy_(answer[0]), answer[1])


def _of_watched(call: Call) -> Answer:
    """The op of torch's registry in a trace; SDPA, and torch's functions, for tensor subclasses, modes and transforms:
    they know what to do with them."""
    call.require()
    from evoattn.ops import custom_op  # its imports take a second, which whoever traces has spent

    if _is_compiling() or custom_op.is_fake(call.query):
        if call.out is not None:
            require_out(call.out, call.query, call.value)
        return custom_op.traced(call)
    if shapes.recorders():
        shapes.miss(WATCHED)
    refuse(WATCHED, call.strict, call.batch_invariant)
    if call.out is not None:
        require_out(call.out, call.query, call.value)
    return torch_answer.answer(call)


def _with_sdpa_s_own(call: Call, attn_mask: Any, dropout_p: float, named: bool) -> Answer:
    """The answer to a call with SDPA's mask or dropout; `named`: its causal mask was given as `causal`, which SDPA has
    not."""
    beyond = call.has_variant or call.return_lse or named
    if dropout_p:
        if beyond:
            raise ValueError(DROPOUT_ALONE)
        return _by_sdpa_alone(call, attn_mask, dropout_p, DROPOUT)
    if not beyond and (reason := why_only_torch(attn_mask, call)):
        return _by_sdpa_alone(call, attn_mask, 0.0, reason)
    return attend(with_mask(call, attn_mask))


def _by_sdpa_alone(call: Call, attn_mask: Any, dropout_p: float, reason: str) -> Tensor:
    """SDPA's answer to what no kernel takes for that reason, and its errors."""
    refuse(reason, call.strict, call.batch_invariant)
    if shapes.recorders():
        shapes.miss("it has dropout" if dropout_p else reason)
    if call.out is not None:
        require_out(call.out, call.query, call.value)
    unseen, is_causal = None, call.causal
    if causal_kind(attn_mask) is not None:  # torch's causal masks know its function by a name, maybe ours
        call = with_mask(call, attn_mask)
        lengths = call.query.shape[-2], call.key.shape[-2]
        is_causal = call.mask != CAUSAL_LOWER_RIGHT or lengths[0] == lengths[1]
        attn_mask = None if is_causal else torch_answer.lower_right_mask(*lengths, call.query.device)
        unseen = attn_mask if lengths[0] > lengths[1] else None
    words: dict[str, Any] = dict(is_causal=is_causal, scale=call.scale, enable_gqa=call.enable_gqa)
    answer = torch_answer.sdpa(call.query, call.key, call.value, attn_mask, dropout_p, **words)
    answer = answer if unseen is None else torch_answer.without_unseen(answer, unseen)
    return answer if call.out is None else call.out.copy_(answer)
