"""Packed queries over pages, as serving engines have them: prompts, drafts and single tokens in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evoattn.ops.arguments import SEQUSED, STARTS_Q, TABLE, Causal
from evoattn.ops.attention import attend
from evoattn.ops.call import Answer, Call, call_of, out_like, whole
from evoattn.ops.runtime import NoKernel
from evoattn.ops.torch_modes import is_ordinary

Decodes = int | tuple[int, int]
"""So many sequences of one query each; or (sequences, the most queries of one)."""


def attention_mixed(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seqused_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    decodes: Decodes = 0,
    scale: float | None = None,
    causal: Causal = None,
    window: tuple[int, int] | None = None,
    softcap: float | None = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    strict: bool = False,
) -> Answer:
    """Attention of packed queries, each sequence over its own keys in pages of a cache: chunks of prompts, drafts and
    single tokens together, as in `flash_attn_varlen_func` with `block_table` and `seqused_k`.

    Shapes: query `[total_q, heads, head_dim]`, k_cache and v_cache `[pages, page, kv_heads, head_dim]`, block_table
    int32 `[sequences, most_pages]`, seqused_k int32 `[sequences]`, cu_seqlens_q int32 `[sequences + 1]`, all on the
    device. max_seqlen_q is a number, at least the longest sequence's queries; more of one are cut off. A sequence may
    have no queries or no keys; a query that sees no key has the output 0. Rows of query in front of the first sequence
    or behind the last one have answers that mean nothing.

    Engines put decoding sequences first. `decodes` says how many: `decodes=100` that the first 100 have at most one
    query each, `decodes=(100, 4)` at most four. They are then a launch of their own, whose kernel splits their keys,
    and the others another. Without it one launch serves all. The answers are the same.

    The other arguments are those of `evoattn.attention_paged`. Under `causal`, in `window` and of `alibi_slopes` query
    i of a sequence counts from its key i + seqused_k - queries. The answer has query's shape, dtype and memory layout;
    `return_lse` adds the natural logarithm of each query's sum of exponentials, `[heads, total_q]` float32.

    Nothing waits for the device, lengths are read there, and one plan serves all batches whose sizes round to the same:
    a call may be captured in a CUDA graph after one like it has run. Raises `ValueError` for arguments that do not fit,
    `TypeError` for ones of the wrong type, and `NoKernel` under `strict` where no kernel serves the call.
    """
    if query.dim() != 3:
        raise ValueError(f"query must have three dimensions, [total_q, heads, head_dim], not {list(query.shape)}.")
    words: dict[str, Any] = dict(scale=scale, causal=causal, window=window, softcap=softcap, sinks=sinks, strict=strict)
    words |= dict(block_table=block_table, seqused_k=seqused_k, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q)
    words |= dict(alibi_slopes=alibi_slopes, return_lse=return_lse, out=None if out is None else out[None])
    call = call_of(query, k_cache, v_cache, words)
    answer = call.given_back(_answer(call, decodes))
    if out is None:
        return answer
    return out if isinstance(answer, Tensor) else (out, answer[1])


def _answer(call: Call, decodes: Decodes) -> Answer:
    count, most = decodes if isinstance(decodes, tuple) else (decodes, 1)
    count, most = whole("decodes", count), whole("decodes", most)
    if not count:
        return attend(call)
    call.require()
    starts = call.terms[STARTS_Q]
    assert starts is not None
    if not (0 <= count < len(starts) and most > 0):
        raise ValueError(f"decodes={decodes!r} must be of the {len(starts) - 1} sequences and at least one query each.")
    if torch.compiler.is_compiling() or not is_ordinary(call.query, call.key, call.value):
        return attend(call)
    rows = min(count * most, call.query.shape[2])
    if count == len(starts) - 1 and rows == call.query.shape[2]:
        return attend(replace(call, longest=(min(most, call.longest[0]), call.longest[1])))
    try:
        return _in_two(call, count, most, rows)
    except NoKernel:  # torch's answer is of all rows
        return attend(call)


def _in_two(call: Call, count: int, most: int, rows: int) -> Answer:
    """The sequences before number `count`, which have at most `most` queries each and end in front of row `rows`, and
    the others, in a launch each. Raises `NoKernel` where no kernel serves one of them."""
    query, starts = call.query, call.terms[STARTS_Q]
    assert starts is not None
    out = out_like(query, call.value) if call.out is None else call.out
    rest = query.shape[2] if count < len(starts) - 1 else 0
    sums = None
    if call.return_lse:
        sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    parts = (
        (slice(None, count), slice(None, count + 1), rows, min(most, call.longest[0])),
        (slice(count, None), slice(count, None), rest, call.longest[0]),
    )
    made: list[Tensor] = []
    for which, bounds, end, longest in parts:
        if not end:
            continue
        terms = list(call.terms)
        for place, some in ((SEQUSED, which), (TABLE, which), (STARTS_Q, bounds)):
            term = terms[place]
            terms[place] = None if term is None else term[some]
        part = replace(
            call,
            query=query[:, :, :end],
            out=out[:, :, :end],
            terms=tuple(terms),
            longest=(longest, call.longest[1]),
            strict=True,
        )
        answer = attend(part)
        if not isinstance(answer, Tensor):
            made.append(answer[1])
    if sums is None:
        return out
    return out, _joined(sums, made, starts[count])


def _joined(sums: Tensor, made: list[Tensor], border: Tensor) -> Tensor:
    """The log-sum-exps of the first part up to row `border`, which the device knows, of the last from there on."""
    if len(made) == 1:
        sums[..., : made[0].shape[2]] = made[0]
        return sums
    first, last = made
    sums.copy_(last)
    rows = first.shape[2]
    before = torch.arange(rows, device=sums.device) < border
    sums[..., :rows] = torch.where(before, first, last[..., :rows])
    return sums
