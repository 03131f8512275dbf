"""What torch computes where no kernel of ours runs: `scaled_dot_product_attention` itself, kept from what it cannot
take; the formula, for what SDPA lacks, and for the log-sum-exp, which it does not give; of packed sequences torch's
`varlen_attn`, or the formula over sequences of one length. And the promises that forbid it: `NoKernel` is raised rather
than break them, as nothing is known that would keep the bits of torch's rows in every batch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evoattn.model.block_list import parse_blocks
from evoattn.model.mask import CAUSAL_LOWER_RIGHT, CAUSAL_UPPER_LEFT
from evoattn.model.score import INDICES, SCORE, Table, evaluate
from evoattn.model.scoring import CAP, CAPPED, added
from evoattn.ops.arguments import (
    ALIGNMENT,
    BIAS,
    SEQUSED,
    SINKS,
    SLOPES,
    STARTS_K,
    STARTS_Q,
    TABLE,
    TERMS,
    autocast,
    has_autocast,
    is_apart,
    without_autocast,
)
from evoattn.ops.call import FLOATS, Answer, Call, out_like
from evoattn.ops.given import dequantised, is_eight_bits

SCORES_PER_CHUNK = 1 << 26
"""Scores that are made at once: 256 MiB in float32."""
LEAST_CAPABILITY = (8, 0)
"""CUDA compute capability that `varlen_attn` needs."""
MOST_HEAD_DIM = 256
"""The largest head_dim that `varlen_attn` takes."""
MOST_BATCHES = 65535
"""Of a grid of CUDA. Torch 2.11 raises for more with a bias that all share, and where it pads head_dims."""
SDPA = torch._C._nn.scaled_dot_product_attention
"""`torch.nn.functional.scaled_dot_product_attention` itself, whatever `evoattn.sdpa` puts in its place."""
MATH = torch._scaled_dot_product_attention_math
"""By the formula, on any device."""
_PLAIN = Tensor, torch.nn.Parameter


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Torch's own; its errors are raised as they are, and `NoKernel` if `evoattn.enable` has promised its bits.

    Tensors without elements go to its formula, as its kernels divide by their sizes, and those that do not fit, as the
    formula raises where kernels read past the end or end the process. On a GPU it gets copies of what lies at odd
    addresses: its kernels load 16 bytes at once without a look at where tensors begin
    (https://github.com/pytorch/pytorch/issues/183484), after which a process can no longer use the device. On a CPU a
    float32 mask beside float64 is made float64: torch's kernel reads it in other steps than it lies, and answers wrong
    (2.11 and 2.13). One query under a causal mask sees the first key alone: where heads share keys by a stride of 0,
    torch's efficient kernel makes rows of them and shows all keys (2.11; head_dims above 256, and float32)."""
    refuse("it was left to torch")
    tensors = query, key, value
    if attn_mask is not None and all(map(_is_cpu_s, (query, attn_mask), (torch.float64, torch.float32))):
        attn_mask = _doubled(attn_mask)
    if attn_mask is not None and _is_lost_by_vmap(attn_mask):
        mask = _as_added(attn_mask, query.dtype)
        return MATH(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
    if not _is_watched() and all(map(_is_plain, tensors)):
        unfit = 0 in (*query.shape, *key.shape, *value.shape) or not _fit(query, key, value)
        if unfit and query.device == key.device == value.device:
            if has_autocast(query.device.type):  # which knows SDPA, not its formula
                query, key, value = autocast(query.device.type, query, key, value)
                attn_mask = autocast(query.device.type, attn_mask)[0] if isinstance(attn_mask, Tensor) else attn_mask
            grouped = enable_gqa and all(tensor.shape[-3] for tensor in tensors)  # it divides by the heads then
            mask = _as_added(attn_mask, query.dtype)
            return MATH(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped)[0]
        if not unfit and is_causal and attn_mask is None and query.shape[-2] == 1 and not key.stride(-3):
            key, value, is_causal = key[..., :1, :], value[..., :1, :], False  # all that the mask shows
        if all(tensor.is_cuda for tensor in tensors):
            query, key, value = map(aligned, (query, key, value))
            attn_mask = None if attn_mask is None else readable(attn_mask, key.shape[-2])
    return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _as_added(mask: Any, dtype: torch.dtype) -> Any:
    """For `MATH`, which adds a bool mask as 0 and 1: SDPA makes it 0 and -inf before."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf)


def _is_cpu_s(tensor: Tensor, dtype: torch.dtype) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype == dtype and tensor.device.type == "cpu"


def _doubled(mask: Tensor) -> Tensor:
    """In float64; dimensions that repeat one number in memory still do."""
    once = tuple(slice(0, 1) if step == 0 else slice(None) for step in mask.stride())
    return mask[once].double().expand(mask.shape)


def is_aligned(tensor: Tensor) -> bool:
    """Whether rows lie at multiples of 16 bytes in its memory, each in one piece: FlashAttention refuses others, or
    reads them by misaligned loads. Where there is one row, how far the next one would be counts, too: torch's efficient
    kernel raises by that."""
    *strides, last = tensor.stride()
    places = tensor.storage_offset(), *(s for s, size in zip(strides, tensor.shape) if size > 1), *strides[-1:]
    return last == 1 and not any(place * tensor.element_size() % ALIGNMENT for place in places)


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy in one piece where it begins, or its rows of whole 16 bytes lie, at other places."""
    offset, row = (count * tensor.element_size() % ALIGNMENT for count in (tensor.storage_offset(), tensor.shape[-1]))
    return tensor if is_aligned(tensor) or (row and not offset) else tensor.clone(memory_format=torch.contiguous_format)


def readable(mask: Tensor, keys: int) -> Tensor:
    """The mask, or a copy where torch's kernels would load numbers from places that are no multiples of 16 bytes: of
    one column for all keys, as of torch 2.11, or where it begins or its rows lie so."""
    if not _is_strided(mask) or not mask.dim():
        return mask
    if mask.shape[-1] == 1 < keys:
        return mask.expand(*mask.shape[:-1], keys).contiguous()
    return mask if mask.dtype == torch.bool else aligned(mask)


def _is_strided(tensor: Tensor) -> bool:
    """Whether it has strides and is of no subclass but `torch.nn.Parameter`, as a learned bias is."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def _fit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether columns of query and key, and rows of key and value, are as many."""
    return query.shape[-1] == key.shape[-1] and key.shape[-2] == value.shape[-2]


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is a strided tensor of three dimensions or more."""
    return _is_strided(tensor) and tensor.dim() > 2


def _is_watched() -> bool:
    """Whether a compiler, a transform or a trace is at work: tensors have no addresses, or sizes of one call only."""
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None


def _is_lost_by_vmap(mask: Tensor) -> bool:
    """Whether torch's rule of `vmap` for its CUDA kernels raises (2.11): it joins the batches of query with those of
    the transform, but not those of a mask that is the same in all."""
    functorch = torch._C._functorch
    if torch.compiler.is_compiling() or functorch.peek_interpreter_stack() is None or not isinstance(mask, Tensor):
        return False
    return mask.dim() == 4 and mask.shape[0] > 1 and not functorch.is_batchedtensor(mask)


def lower_right_mask(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """Bool `[seqlen_q, seqlen_k]`: query i sees keys j <= i + seqlen_k - seqlen_q."""
    return torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device).tril(diagonal=seqlen_k - seqlen_q)


def without_unseen(answer: Tensor, mask: Tensor) -> Tensor:
    """The answer with 0 for queries of which the mask hides every key: some of SDPA's kernels give them the mean of all
    values, or NaN."""
    hidden = ~mask if mask.dtype == torch.bool else torch.isneginf(mask)
    return answer.masked_fill(hidden.all(-1, keepdim=True), 0)


def answer(call: Call) -> Answer:
    """Torch's answer to a call, in its `out` if there is one, with `return_lse` the log-sum-exp beside it. SDPA's
    errors are raised as they are, `ValueError` and `TypeError` for what does not fit. A query that sees no key has the
    output 0, but where SDPA alone says what it has. Keys and values of 8 bits are made such as query's first."""
    refuse("it was left to torch", batch_invariant=call.batch_invariant)
    _require_dense(call)
    if (parts := by_batches(call, answer)) is not None:
        return parts
    if is_eight_bits(call.value):
        call.require()
        call = dequantised(call)
    tensors = call.query, call.key, call.value
    if call.paged and all(isinstance(tensor, Tensor) for tensor in tensors) and is_apart(*tensors):
        with without_autocast(call.query.device.type):  # which joins no tensors of another 16 bits than its own
            call = replace(call, key=torch.cat((call.value, call.key), -1))
    if not call.has_variant:
        output = _by_sdpa(call)
        output = output if call.out is None else call.out.copy_(output)
        if not call.return_lse:
            return output
        with without_autocast(call.query.device.type):
            return output, log_sum_exp(call)
    call.require()
    kind = call.query.device.type
    if has_autocast(kind):
        call = call.autocast(kind)
    with without_autocast(kind):
        output, lse = _of_sequences(call) if call.packed else by_formula(call)
    output = output if call.out is None else call.out.copy_(output)
    return output if lse is None else (output, lse)


def batches_of(call: Call) -> list[Call]:
    """A call in parts of `MOST_BATCHES`, of more batches; empty for others, and where that needs more than slices."""
    query, others = call.query, (call.key, call.value)
    if not _is_plain(query) or _is_watched() or query.dim() != 4 or query.shape[0] <= MOST_BATCHES:
        return []
    if call.packed or call.paged or call.score is not None or call.blocks:
        return []
    if not all(_is_plain(one) and one.dim() == 4 and one.shape[0] == query.shape[0] for one in others):
        return []
    ends = range(MOST_BATCHES, query.shape[0] + MOST_BATCHES, MOST_BATCHES)
    return [_of_batches(call, slice(end - MOST_BATCHES, end)) for end in ends]


def _of_batches(call: Call, part: slice) -> Call:
    query, key, value = (one[part] for one in (call.query, call.key, call.value))
    out = None if call.out is None else call.out[part]
    terms = list(call.terms)
    for which, term in enumerate(call.terms):
        shared = term is None or which in (SINKS, SLOPES) or (which == BIAS and term.dim() < 4) or len(term) == 1
        terms[which] = term if term is None or shared else term[part]
    return replace(call, query=query, key=key, value=value, out=out, terms=tuple(terms))


def by_batches(call: Call, answer: Callable[[Call], Answer]) -> Answer | None:
    """What `answer` says of `batches_of` a call, as one that lies as query does; None where there are none."""
    if not (parts := batches_of(call)):
        return None
    found = [answer(part) for part in parts]
    outputs = [one if isinstance(one, Tensor) else one[0] for one in found]
    if (output := call.out) is None:
        order = sorted(range(4), key=out_like(call.query, call.value, "meta").stride().__getitem__, reverse=True)
        output = torch.cat([one.permute(order) for one in outputs], order.index(0))
        output = output.permute([order.index(dim) for dim in range(4)])
    return (output, torch.cat([one[1] for one in found])) if call.return_lse else output


def _require_dense(call: Call) -> None:
    """Raise `ValueError` for nested and sparse tensors beside what SDPA lacks: it alone knows some of them."""
    if not call.has_variant and not call.return_lse and call.mask != CAUSAL_LOWER_RIGHT:
        return
    for name, tensor in zip(("query", "key", "value"), (call.query, call.key, call.value), strict=True):
        if isinstance(tensor, Tensor) and (tensor.is_nested or tensor.layout is not torch.strided):
            kind = "nested" if tensor.is_nested else "sparse"
            raise ValueError(
                f"{name} is {kind}, which only a call of what SDPA has may be; attention_varlen takes packed sequences."
            )


def _by_sdpa(call: Call) -> Tensor:
    query, key, value = call.query, call.key, call.value
    words: dict[str, Any] = {"scale": call.scale, "enable_gqa": call.enable_gqa}
    if call.mask == CAUSAL_LOWER_RIGHT and query.shape[-2] != key.shape[-2]:
        mask = lower_right_mask(query.shape[-2], key.shape[-2], query.device)
        output = sdpa(query, key, value, mask, **words)
        return without_unseen(output, mask) if query.shape[-2] > key.shape[-2] else output
    return sdpa(query, key, value, is_causal=call.causal, **words)


def _require_numbers(call: Call) -> None:
    """Raise `ValueError` for what SDPA refuses, and the formula would answer to: integers rounded to 0, complex numbers
    without their imaginary parts, no heads."""
    query, key, value = call.query, call.key, call.value
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if query.dtype not in FLOATS or not query.dtype == key.dtype == value.dtype:
        found = ", ".join(str(tensor.dtype).removeprefix("torch.") for tensor in (query, key, value))
        raise ValueError(f"query, key and value must be of one dtype of real floating-point numbers, not {found}.")
    if kv_heads != heads and not call.enable_gqa:
        raise ValueError(f"{kv_heads} K/V heads for {heads} query heads need enable_gqa=True.")
    if kv_heads != heads and (not kv_heads or heads % kv_heads):
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} K/V heads.")


def wide(tensor: Tensor) -> Tensor:
    """In float32, or float64 as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _factor(call: Call) -> float:
    return 1 / math.sqrt(max(1, call.query.shape[-1])) if call.scale is None else call.scale


def by_formula(call: Call, scores_at_once: int = SCORES_PER_CHUNK) -> tuple[Tensor, Tensor | None]:
    """The answer to a variant of attention, and the log-sum-exp where it is wanted: SDPA with a mask tensor where it
    can say what is asked, else the formula, in float32 (float64 in itself) and some rows at a time. A query that sees
    no key has the output 0.

    `scores_at_once` bounds the scores in memory. Raises `ValueError` where fewer K/V heads come without `enable_gqa` or
    do not divide query's, for several dtypes or one of no real floating-point numbers, and what SDPA raises."""
    _require_numbers(call)
    used, bias, sinks = call.term(SEQUSED), call.term(BIAS), call.term(SINKS)
    if used is not None and not call.finite:
        key, value = keys_in_use(call.key, call.value, used, call.term(TABLE))
        call = replace(call, key=key, value=value)
    query, key, value = call.query, call.key, call.value
    seqlen_q, seqlen_k = query.shape[-2], key.shape[-2]
    diagonal = diagonal_of(call)
    has_formula = call.softcap or sinks is not None or call.term(SLOPES) is not None or call.score is not None
    if not has_formula and not call.return_lse:
        hidden = _hidden(call, slice(0, seqlen_q), diagonal)
        mask = bias if hidden is None else ~hidden
        if bias is not None and hidden is not None:
            mask = bias.masked_fill(hidden, -math.inf)
        mask = mask if mask is None else torch.atleast_2d(mask)  # SDPA takes no fewer dimensions
        output = sdpa(query, key, value, mask, scale=call.scale, enable_gqa=call.enable_gqa)
        return output if mask is None else without_unseen(output, mask), None
    groups = query.shape[-3] // max(1, key.shape[-3])
    keys, values = (t.repeat_interleave(groups, dim=-3) for t in (wide(key), value))
    rows = rows_at_once(call, scores_at_once)
    outputs, sums = [], []
    for first in range(0, max(1, seqlen_q), rows):
        chunk = slice(first, min(first + rows, seqlen_q))
        scores = scores_of(call, call.query[..., chunk, :], keys, chunk, diagonal)
        unseen = torch.isneginf(scores).all(-1, keepdim=True)
        if sinks is not None:
            column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, column), dim=-1)
        nothing = torch.isneginf(scores).all(-1, keepdim=True)
        scores = scores.masked_fill(nothing, 0)  # softmax and logsumexp have NaN for gradients of -inf alone
        weights = torch.softmax(scores, dim=-1)[..., :seqlen_k].masked_fill(unseen, 0)
        outputs.append(weights.to(query.dtype) @ values)
        sums.append(torch.logsumexp(scores, dim=-1).masked_fill(nothing[..., 0], -math.inf))
    return torch.cat(outputs, dim=-2), torch.cat(sums, dim=-1).float() if call.return_lse else None


def diagonal_of(call: Call) -> int | Tensor:
    """The key of query 0's diagonal, of keys in use for each batch."""
    used, seqlen_q, seqlen_k = call.term(SEQUSED), call.query.shape[-2], call.key.shape[-2]
    if call.mask == CAUSAL_UPPER_LEFT:
        return 0
    return seqlen_k - seqlen_q if used is None else used[:, None, None, None] - seqlen_q


def rows_at_once(call: Call, scores_at_once: int) -> int:
    """Rows of queries of which so many scores are made at once, at least one."""
    return max(1, scores_at_once // max(1, math.prod(call.query.shape[:-2]) * call.key.shape[-2]))


def scores_of(call: Call, queries: Tensor, keys: Tensor, rows: slice, diagonal: int | Tensor) -> Tensor:
    """Scores of some rows, as softmax takes them but for sinks; `queries` are those rows, `keys` are in float32, of as
    many heads as queries."""
    scores = (wide(queries) * _factor(call)) @ keys.transpose(-1, -2)
    if call.softcap:
        scores = evaluate(CAPPED, {SCORE: scores, CAP.name: call.softcap}, torch)
    if (slopes := call.term(SLOPES)) is not None:
        sides = zip("hqk", _ranges(slice(len(slopes)), rows, slice(keys.shape[-2]), device=keys.device), strict=True)
        scores = evaluate(_WITH_SLOPES, {SCORE: scores, "slopes": slopes.float(), **dict(sides), "d": diagonal}, torch)
    elif (bias := call.term(BIAS)) is not None:
        of_rows = bias if bias.dim() < 2 or bias.shape[-2] == 1 else bias[..., rows, :]
        scores = evaluate(_WITH_BIAS, {SCORE: scores, "bias": _Elements(of_rows), **dict.fromkeys("bhqk", 0)}, torch)
    if call.score is not None:
        scores = call.score.of(scores, _indices(call, rows, diagonal))
    if (hidden := _hidden(call, rows, diagonal)) is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    if call.blocks:
        scores = scores.masked_fill(~_listed(call, _indices(call, rows, diagonal)), -math.inf)
    return scores


EMPTY, PARTIAL, FULL = range(3)
"""What a block is by its lists."""


def states_of(lists: Sequence[tuple[Tensor | None, Tensor | None]], columns: int) -> Tensor:
    """What each of so many blocks of keys is, int32 `[batch or 1, heads or 1, blocks of rows, columns]`: `lists` are
    the counts and numbers of PARTIAL blocks, then of FULL ones, if there are any."""
    first = lists[0][0]
    assert first is not None
    states = first.new_zeros((*first.shape, columns + 1), dtype=torch.int32)
    for kind, (counts, blocks) in zip((PARTIAL, FULL), lists, strict=True):
        if counts is not None and blocks is not None:
            listed = torch.arange(blocks.shape[-1], device=blocks.device) < counts[..., None]
            states.scatter_(-1, blocks.clamp(0, columns).masked_fill(~listed, columns).long(), kind)
    return states[..., :columns].contiguous()


def _listed(call: Call, indices: dict[str, int | Tensor]) -> Tensor:
    """Bool, of scores with these indices: the keys that block lists show."""
    mask, lists = parse_blocks(call.blocks), call.terms[-4:]
    states = states_of(((lists[0], lists[1]), (lists[2], lists[3])), -(-call.key.shape[-2] // mask.keys))
    batch, head, query, key = (indices[name] for name in INDICES[:4])
    at = [index * (size > 1) for index, size in zip((batch, head), states.shape, strict=False)]
    found = states[at[0], at[1], query // mask.rows, key // mask.keys]
    shown = True if call.score is None else call.score.shows(indices)
    return (found == FULL) | ((found == PARTIAL) & shown)


def keys_in_use(key: Tensor, value: Tensor, used: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """K and V `[batch, kv_heads, seqlen_k, head_dim]` with zeros behind the last key in use, where anything may lie:
    copies, out of pages `[pages, kv_heads, page, head_dim]` if there is a table `[batch, pages]`. Waits for nothing."""
    if table is not None:
        places = table.long().clamp(0, key.shape[0] - 1)
        key, value = (t.transpose(1, 2)[places].flatten(1, 2).transpose(1, 2) for t in (key, value))
    behind = (torch.arange(key.shape[2], device=key.device) >= used[:, None])[:, None, :, None]
    return key.masked_fill(behind, 0), value.masked_fill(behind, 0)


def log_sum_exp(call: Call) -> Tensor:
    """Natural logarithm of the sum of exponentials of each query's masked and scaled scores, `[batch, heads,
    seqlen_q]` float32, of a call without a variant.

    `-inf` for a query that sees no key. Scores are made in float32 (of float64 in itself), some rows at a time. Heads
    and batches are broadcast as SDPA broadcasts them."""
    query, keys = call.query, wide(call.key)
    seqlen_q, seqlen_k = query.shape[-2], keys.shape[-2]
    if query.dim() > 2:
        keys = keys.repeat_interleave(max(1, query.shape[-3] // max(1, keys.shape[-3])), dim=-3)
    rows = max(1, SCORES_PER_CHUNK // max(1, math.prod(query.shape[:-2]) * seqlen_k))
    diagonal = seqlen_k - seqlen_q if call.mask == CAUSAL_LOWER_RIGHT else 0
    parts = []
    for first in range(0, seqlen_q, rows):
        chunk = slice(first, min(first + rows, seqlen_q))
        scores = scores_of(call, query[..., chunk, :], keys, chunk, diagonal)
        parts.append(torch.logsumexp(scores, dim=-1))
    if not parts:
        heads = torch.broadcast_shapes(query.shape[:-2], keys.shape[:-2])
        return query.new_empty((*heads, 0), dtype=torch.float32)
    return torch.cat(parts, dim=-1).float()


def _indices(call: Call, rows: slice, diagonal: int | Tensor) -> dict[str, int | Tensor]:
    """Those of `Score`, which broadcast over the scores `[batch, heads, rows, seqlen_k]`."""
    batch, heads = call.query.shape[:2]
    sides = _ranges(slice(batch), slice(heads), rows, slice(call.key.shape[2]), device=call.query.device)
    return dict(zip(INDICES, (*sides, diagonal), strict=True))


def _ranges(*sides: slice, device: torch.device) -> list[Tensor]:
    """The whole numbers of each side of a tensor, which broadcast over it."""
    made = [torch.arange(one.start or 0, one.stop, device=device) for one in sides]
    return [one.view(-1, *(1,) * (len(made) - 1 - i)) for i, one in enumerate(made)]


_WITH_SLOPES = added(Table("slopes", "fp32", (1,), "slopes"))
_WITH_BIAS = added(Table("bias", "fp32", (1,) * 4, "bias"))


class _Elements:
    """A table that has the wanted elements of all scores, whatever the indices."""

    shape = (1,) * 4

    def __init__(self, elements: Tensor) -> None:
        self.elements = elements

    def __getitem__(self, places: Any) -> Tensor:
        return self.elements


def _hidden(call: Call, rows: slice, diagonal: int | Tensor) -> Tensor | None:
    """Bool `[rows, seqlen_k]`, or `[batch, 1, rows, seqlen_k]`: the keys that the mask and the window hide, and those
    that are not in use; None if there are none."""
    used, device = call.term(SEQUSED), call.query.device
    if not call.causal and call.window is None and used is None:
        return None
    middle = torch.arange(rows.start, rows.stop, device=device)[:, None] + diagonal
    keys = torch.arange(call.key.shape[-2], device=device)
    hidden = torch.zeros(middle.shape[-2], len(keys), dtype=torch.bool, device=device)
    if used is not None:
        hidden = hidden | (keys >= used[:, None, None, None])
    past, ahead = call.window or (-1, -1)
    if call.causal:
        ahead = 0
    if ahead >= 0:
        hidden = hidden | (keys > middle + ahead)
    if past >= 0:
        hidden = hidden | (keys < middle - past)
    return hidden


def _of_sequences(call: Call) -> tuple[Tensor, Tensor | None]:
    """The answer to a call of packed sequences, and the log-sum-exp where it is wanted; the causal mask ends in the
    lower right corner of each sequence. Nothing waits for the device."""
    query = call.query
    if not (query.shape[2] and call.key.shape[2]):
        return _of_nothing(call)
    if not call.return_lse and (output := _by_varlen_attn(call)) is not None:
        return output, None
    starts_q, starts_k, used = (
        None if term is None else term.long() for term in (call.terms[which] for which in (STARTS_Q, STARTS_K, SEQUSED))
    )
    assert starts_q is not None
    most_q, most_k = max(1, call.longest[0]), call.longest[1]  # else a row would be read out of none
    # Keys begin at column 0, and queries end at the last row, so that the diagonal of a sequence's own ends is that of
    # its keys in use.
    columns, rows = (torch.arange(most, device=query.device) for most in (most_k, most_q))
    keys, values = call.key, call.value
    if starts_k is not None:
        used = starts_k[1:] - starts_k[:-1]
        keys, values = (_gathered(tensor, starts_k[:-1, None] + columns) for tensor in (keys, values))
    queries = _gathered(query, starts_q[1:, None] - most_q + rows)
    terms = list(call.terms)
    terms[STARTS_Q], terms[STARTS_K], terms[SEQUSED] = None, None, used
    answer, lse = by_formula(
        replace(call, query=queries, key=keys, value=values, terms=tuple(terms), longest=(0, 0), out=None)
    )
    places = torch.arange(query.shape[2], device=query.device)
    # Rows past the last sequence take part in it: after an index out of range a process can no longer use the device.
    sequence = torch.bucketize(places, starts_q[1:], right=True).clamp(max=len(starts_q) - 2)
    row = (places - starts_q[1:][sequence] + most_q).clamp(0, most_q - 1)
    end_to_end = answer.transpose(1, 2)[sequence, row].transpose(0, 1)[None]
    return end_to_end, None if lse is None else lse.transpose(1, 2)[sequence, row].transpose(0, 1)[None]


def _gathered(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows `[sequences, length]` of `[1, heads, total, head_dim]`: `[sequences, heads, length, head_dim]`; of rows that
    there are not, others."""
    return tensor[0].transpose(0, 1)[rows.clamp(0, tensor.shape[2] - 1)].transpose(1, 2)


def _of_nothing(call: Call) -> tuple[Tensor, Tensor | None]:
    """As `_of_sequences`, without a query or without a key. The output is made of no number of the tensors, but they
    have gradients, of 0."""
    query, sinks = call.query, call.term(SINKS)
    output = query.new_zeros(*query.shape[:3], call.value.shape[3])
    nothing = (tensor.flatten()[:0] for tensor in (query, call.key, call.value))
    output = torch.cat((output.flatten(), *nothing)).view(output.shape)
    if not call.return_lse:
        return output, None
    if sinks is not None:
        return output, sinks.float()[None, :, None].expand(query.shape[:3]).contiguous()
    return output, torch.full(query.shape[:3], float("-inf"), device=query.device)


def _varlen_attn_takes(call: Call) -> bool:
    """Whether torch's `varlen_attn` can say what is asked, of tensors that lie so."""
    query, key, value = call.query, call.key, call.value
    beyond = any(term is not None for term in call.terms[: TERMS.index("cu_seqlens_q")])
    if not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16) or call.softcap or beyond:
        return False
    if query.shape[3] != value.shape[3] or query.shape[3] % 8 or query.shape[3] > MOST_HEAD_DIM:
        return False
    if not all(map(is_aligned, (query, key, value))):
        return False
    return torch.cuda.get_device_capability(query.device) >= LEAST_CAPABILITY


def _by_varlen_attn(call: Call) -> Tensor | None:
    """Torch's own, where it can say what is asked; else None."""
    if torch.compiler.is_compiling() or not _varlen_attn_takes(call):  # no compiler can look through the search for it
        return None
    from evoattn.peers import torch_varlen  # with it the peers, which other callers need not wait for
    from evoattn.peers.variants import PeerRefused

    try:
        function = torch_varlen.bound(
            torch_varlen.find(),
            causal=call.causal,
            window=call.window,
            scale=call.scale,
            group_size=call.query.shape[1] // call.key.shape[1],
        )
    except (ImportError, PeerRefused):
        return None
    tensors = (tensor[0].transpose(0, 1) for tensor in (call.query, call.key, call.value))
    starts = (call.terms[which].to(torch.int32) for which in (STARTS_Q, STARTS_K))  # type: ignore[union-attr]
    return function(*tensors, *starts, *call.longest).transpose(0, 1)[None]


class NoKernel(RuntimeError):
    """No kernel serves the call, and PyTorch's attention must not: `strict=True` or `batch_invariant=True` was said.
    The message is the reason."""


class Promise:
    """What `evoattn.enable` said of all calls of the process."""

    everywhere = False
    fp8: Callable[[Any, Any], Any] | None = None
    """`attention_fp8.in_eight_bits` where calls are to run in 8 bits."""


PROMISE = Promise()


def is_promised(batch_invariant: bool) -> bool:
    """Whether a call that says so, or not, is to keep the promise."""
    return batch_invariant or PROMISE.everywhere


BROKEN = "PyTorch's attention does not keep what batch_invariant=True promises"


def refuse(reason: str, strict: bool = False, batch_invariant: bool = False) -> None:
    """Raise `NoKernel` where torch would compute and the call, or `evoattn.enable`, has said that it must not. `reason`
    has no full stop."""
    if is_promised(batch_invariant):
        raise NoKernel(f"No kernel serves this call: {reason}. {BROKEN}.")
    if strict:
        raise NoKernel(f"No kernel serves this call: {reason}.")
