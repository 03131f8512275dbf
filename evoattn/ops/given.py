"""Calls out of what a caller gave: packed sequences, pages, masks of torch, scales of K and V of 8 bits, arguments by
their names; slopes and a bias that an expression adds to scores, as arguments, of which kernels read several at once.
And what torch makes of K and V of 8 bits."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor

from evoattn.model.forward import MAIN
from evoattn.model.mask import CAUSAL_UPPER_LEFT
from evoattn.model.problem import BIAS_ROW_STEP
from evoattn.model.scales import SCALE_COLUMNS
from evoattn.model.score_lines import Bias, Slopes
from evoattn.ops.arguments import (
    ALIGNMENT,
    ATTENTION,
    BIAS,
    EIGHT_BIT_NAMES,
    K_SCALE,
    KV_DTYPES,
    MASKS,
    PAGED,
    SLOPES,
    STARTS_K,
    STARTS_Q,
    TABLE,
    TERMS,
    V_SCALE,
    VARLEN,
    Score,
    aligned_mask_of,
    autocast_dtype,
    cap_of,
    has_autocast,
    is_apart,
    is_ordinary,
    mask_of,
    number,
    require_flags,
    scale_of,
    window_of,
)
from evoattn.ops.call import ANSWERS, BESIDE, E4M3, FLOATS, NO_TENSOR, Call, behind, require_out, terms_of, with_tables

CAUSAL_BIAS = "torch.nn.attention.bias", "CausalBias"
"""The class of torch's causal masks by its names: an import takes two seconds, and a compiler that looks for it in
`sys.modules` fails where an import adds to them meanwhile."""
FORMS = {ATTENTION: "[batch, kv_heads, seqlen_k]", VARLEN: "[total_k, kv_heads]", PAGED: "[pages, page, kv_heads]"}
"""Of scales of each key, by the function that takes them."""
Scale = float | Tensor | None
FLAGS = ("enable_gqa", "deterministic", "batch_invariant")
NO_SCALES = (None,) * (len(TERMS) - K_SCALE)
"""Of `Call.terms`: `with_scales` puts them in."""


def call_of(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> Call:
    """The call of `evoattn.attention`, or with `block_table` of `evoattn.attention_paged`, with `cu_seqlens_q` of
    `evoattn.attention_varlen`, whose tensors these are then. `given` are the other arguments by their names, all that
    the functions but `attn_mask` and `dropout_p` have; those that are left out have their defaults.

    Raises `ValueError` and `TypeError` for what the functions refuse, but for tensors that do not fit: see
    `Call.require`."""
    get = given.get
    table, starts = get("block_table"), get("cu_seqlens_q")
    aligned = not (table is starts is get("cu_seqlens_k") is None)
    flags = {name: get(name, False) for name in FLAGS}
    require_flags(**flags)
    terms = tuple([get(name) for name in TERMS[:K_SCALE]])
    terms = () if all(term is None for term in terms) else terms + NO_SCALES
    fields: dict[str, Any] = {
        "query": query,
        "key": key,
        "value": value,
        "out": get("out"),
        "mask": (aligned_mask_of if aligned else mask_of)(get("causal"), get("is_causal", False)),
        "scale": scale_of(get("scale")),
        "window": window_of(get("window")),
        "softcap": cap_of(get("softcap", 0.0)),
        "return_lse": get("return_lse", False),
        "terms": with_tables(terms, get("score")),
        "strict": get("strict", False),
        "score": get("score"),
        **flags,
    }
    if table is not None:
        if starts is not None:  # packed queries are one batch
            longest = min(whole("max_seqlen_q", get("max_seqlen_q", 0)), query.shape[0])
            query, fields["longest"] = query.unsqueeze(0), (longest, key.shape[1] * table.shape[1])
        fields |= of_pages(query, key, value, get("out"))
    elif aligned:
        longest = get("max_seqlen_q", 0), get("max_seqlen_k", 0)
        fields |= of_sequences(query, key, value, longest, get("out"))
    return with_scales(Call(**fields), get("k_scale"), get("v_scale"), get("q_scale"))


def require_tensors(**tensors: Any) -> None:
    """Raise `TypeError` for the first that is none."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(tensor).__name__}.")


def require_dims(count: int, said: str, **tensors: Any) -> None:
    """Raise `TypeError` for what is no tensor, `ValueError` for one of other dimensions than `said`."""
    require_tensors(**tensors)
    for name, tensor in tensors.items():
        if tensor.dim() != count:
            raise ValueError(f"{name} must have {said}, not {list(tensor.shape)}.")


def of_sequences(query: Tensor, key: Tensor, value: Tensor, longest: tuple[Any, Any], out: Any) -> dict[str, Any]:
    """The fields of a call of packed sequences: tensors `[total, heads, head_dim]` and the longest lengths. Raises
    `ValueError` where they do not fit, `TypeError` for what is no tensor and a length that is no whole number."""
    require_dims(3, "three dimensions, [total, heads, head_dim]", query=query, key=key, value=value)
    fits = key.shape[:2] == value.shape[:2] and key.shape[2] == query.shape[2]
    if not fits or not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(
            f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit: key and value "
            "have as many rows and heads, key has query's head_dim, and query's heads are a multiple of theirs."
        )
    if out is not None:
        require_out(out, query, value)
    return {
        **{name: t.transpose(0, 1)[None] for name, t in (("query", query), ("key", key), ("value", value))},
        "out": None if out is None else out.transpose(0, 1)[None],
        "longest": tuple(  # none has more rows than all have together
            min(whole(f"max_seqlen_{name}", most), len(tensor))
            for name, most, tensor in zip(MAIN[:2], longest, (query, key), strict=True)
        ),
        "enable_gqa": True,
    }


def of_pages(query: Tensor, k_cache: Tensor, v_cache: Tensor, out: Any) -> dict[str, Any]:
    """The fields of a call over pages: query `[batch, seqlen_q, heads, head_dim]`, caches `[pages, page, kv_heads,
    head_dim]`. Raises `ValueError` where they do not fit, `TypeError` for what is no tensor."""
    require_dims(4, "four dimensions", query=query, k_cache=k_cache, v_cache=v_cache)
    *of_keys, head_dim = k_cache.shape
    if k_cache.shape[:3] != v_cache.shape[:3]:
        shapes = f"{list(k_cache.shape)} and {list(v_cache.shape)}"
        raise ValueError(f"k_cache and v_cache must have the same pages and heads, not {shapes}.")
    if not (head_dim and all(of_keys)):
        raise ValueError(f"k_cache must not be empty, as {list(k_cache.shape)} is.")
    fits = head_dim == query.shape[3] or is_apart(query, k_cache, v_cache)
    if not fits or query.shape[2] % of_keys[2]:
        raise ValueError(
            f"query {list(query.shape)} and k_cache {list(k_cache.shape)} do not fit: the last dimension is one "
            "head_dim, and query's heads, its third dimension, are a multiple of the K/V heads, k_cache's third."
        )
    if out is not None:
        require_out(out, query, v_cache)
    return {
        "query": query.transpose(1, 2),
        "key": k_cache.transpose(1, 2),
        "value": v_cache.transpose(1, 2),
        "out": None if out is None else out.transpose(1, 2),
        "enable_gqa": True,
    }


def whole(name: str, length: Any) -> Any:
    """NumPy's numbers and tensors of one element as Python's int; a trace's symbols as they are. Raises `TypeError`."""
    try:
        return length if isinstance(length, (int, torch.SymInt)) else index(length)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {length!r}.") from None


def causal_kind(mask: Any) -> Literal["upper_left", "lower_right"] | None:
    """Which causal mask an object of `torch.nn.attention.bias` stands for; None for any other tensor."""
    kind = type(mask)
    if kind is Tensor or (kind.__module__, kind.__name__) != CAUSAL_BIAS:
        return None
    return "lower_right" if mask.variant.name == "LOWER_RIGHT" else "upper_left"


def as_bias(mask: Tensor, query: Tensor) -> Tensor:
    """The mask as a bias that is added to scores: -inf where a bool one hides, else the mask itself."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def why_only_torch(mask: Any, call: Call) -> str | None:
    """One reason, without a full stop, why only SDPA can answer to a mask, or refuse it; None where it is a bias of a
    kernel or torch's causal mask."""
    query, key = call.query, call.key
    if causal_kind(mask) is not None:
        return None
    if not all(isinstance(tensor, Tensor) for tensor in (mask, query, key)):
        return NO_TENSOR
    if call.causal:
        return "there are an attn_mask and is_causal"
    if query.dtype not in FLOATS:
        return f"kernels take tensors of float16, bfloat16 and float32, not {str(query.dtype).removeprefix('torch.')}"
    if mask.dtype not in (torch.bool, query.dtype):
        return f"attn_mask is {mask.dtype} beside {query.dtype}, which kernels would round"
    if not (query.dim() == key.dim() == 4 and 2 <= mask.dim() <= 4):
        return "kernels take tensors of four dimensions, and masks of two to four"
    if key.shape[1] != query.shape[1] and not call.enable_gqa:
        return f"{key.shape[1]} K/V heads for {query.shape[1]} query heads need enable_gqa=True"
    whole = (*query.shape[:3], key.shape[2])
    if any(have not in (1, want) for have, want in zip(mask.shape[::-1], whole[::-1], strict=False)):
        return f"attn_mask is not broadcastable to {list(whole)}"
    return None


def with_mask(call: Call, mask: Any) -> Call:
    """The call with what the mask says in its own fields. Nothing is read back from the device.

    Raises `ValueError` for a mask beside a causal one or a bias, and for a causal one of other lengths, `TypeError` for
    what is no tensor."""
    if call.causal:
        raise ValueError("attn_mask and is_causal or causal exclude each other.")
    if call.term(BIAS) is not None:
        raise ValueError("attn_mask and bias exclude each other; add the bias to the mask.")
    kind, query, key = causal_kind(mask), call.query, call.key
    if kind is None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"attn_mask must be a tensor, not {type(mask).__name__}.")
        terms = list(call.terms or terms_of(bias=mask))
        terms[BIAS] = as_bias(mask, query)
        return replace(call, terms=tuple(terms))
    of, lengths = (mask.seq_len_q, mask.seq_len_kv), (query.shape[-2], key.shape[-2])  # its shape is something else
    if of != lengths:
        raise ValueError(f"attn_mask is a causal mask of {of[0]} queries and {of[1]} keys, not of {lengths}.")
    return replace(call, mask=MASKS[kind])


def is_eight_bits(tensor: Any) -> bool:
    """Whether it is a tensor of numbers that scales belong to; of a subclass, if it says so."""
    try:
        return getattr(tensor, "dtype", None) in KV_DTYPES
    except TypeError:  # a subclass that answers to some of torch's functions alone
        return False


def with_scales(call: Call, k_scale: Scale, v_scale: Scale, q_scale: Scale = None) -> Call:
    """The call with the scales of its keys and values among its terms, `[batch, kv_heads]` or, of each key, `[batch or
    pages, kv_heads, rows]`, float32: views of what was given, 1 where nothing was. The same call where both have 16 or
    32 bits. Where value alone has 8 its scales are of columns (`_of_columns`). With a query of 8 bits beside such keys,
    of packed sequences or over pages, those of query come last.

    Raises `ValueError` for scales beside such a key, and those that do not fit, `TypeError` for what is none."""
    asked = q_scale is not None or call.packed or call.paged
    scaled = asked and call.key.dtype == call.value.dtype and call.key.dtype in BESIDE.get(call.query.dtype, ())
    if q_scale is not None and not scaled:
        raise ValueError(
            "q_scale belongs to a query of float8_e4m3fn or int8 beside keys and values of that dtype, or of "
            "float8_e5m2 beside the former."
        )
    if is_eight_bits(call.value) and not is_eight_bits(call.key):
        return _of_columns(call, k_scale, v_scale)
    if not is_eight_bits(call.key):
        if k_scale is None and v_scale is None:
            return call
        raise ValueError(f"k_scale and v_scale belong to keys and values of 8 bits: {EIGHT_BIT_NAMES}.")
    if call.key.dim() != 4 or call.value.dim() != 4 or call.key.shape[:3] != call.value.shape[:3]:
        raise ValueError("key and value of 8 bits must have four dimensions, and as many heads and rows.")
    made = [_scale(name, given, call) for name, given in (("k_scale", k_scale), ("v_scale", v_scale))]
    if made[0].dim() != made[1].dim():
        of_each = next(scale for scale in made if scale.dim() == 3).shape
        made = [scale if scale.dim() == 3 else _of_each_key(scale, tuple(of_each), call) for scale in made]
    if scaled:
        made.append(_scale("q_scale", q_scale, call))
        if any(scale.dim() == 3 for scale in made):
            raise ValueError("scales of each key go with a query of 16 bits, not of 8.")
        if any(scale.numel() > 1 for scale in made):
            made = [scale.expand(_sequences(call), call.key.shape[1]) for scale in made]
    terms = list(call.terms or (None,) * len(TERMS))
    terms[K_SCALE], terms[V_SCALE] = made[:2]
    return replace(call, terms=(*terms, *[scale.contiguous() for scale in made[2:]]), q_scaled=scaled)


def _of_columns(call: Call, k_scale: Scale, v_scale: Scale) -> Call:
    """`with_scales` of a latent cache in pages whose V is e4m3 with a scale of each SCALE_COLUMNS columns of a row,
    `[pages, page, kv_heads, columns / SCALE_COLUMNS]`, and whose rotary columns, key, have query's dtype."""
    key, value = call.key, call.value
    fits = value.dtype == E4M3 and call.paged and is_apart(call.query, key, value)
    if not fits or k_scale is not None or not isinstance(v_scale, Tensor):
        raise ValueError(
            "A value of 8 bits beside a key of more is a latent cache in pages: value float8_e4m3fn, key the other "
            "columns in query's dtype, and v_scale a tensor without a k_scale."
        )
    pages, heads, rows, columns = value.shape
    wanted = [pages, rows, heads, columns // SCALE_COLUMNS]
    if list(v_scale.shape) != wanted or v_scale.dtype != torch.float32 or v_scale.stride(3) != 1:
        raise ValueError(f"v_scale must be float32 {wanted} whose last stride is 1, not {list(v_scale.shape)}.")
    terms = list(call.terms or (None,) * len(TERMS))
    terms[V_SCALE] = v_scale.transpose(1, 2)
    return replace(call, terms=tuple(terms))


def _form(call: Call) -> str:
    return PAGED if call.paged else VARLEN if call.packed else ATTENTION


def _sequences(call: Call) -> int:
    starts, table = call.term(STARTS_K), call.term(TABLE)
    if starts is not None:
        return len(starts) - 1
    return call.key.shape[0] if table is None else len(table)


def _scale(name: str, given: Scale, call: Call) -> Tensor:
    """One of `with_scales`."""
    key, form, sequences = call.key, _form(call), _sequences(call)
    if not isinstance(given, Tensor):
        value = 1.0 if given is None else number(name, given)
        if not value >= 0:  # kernels keep the largest score before it is scaled
            raise ValueError(f"{name} must not be negative, as {value} is.")
        return tensor_of_number(value, key)
    heads, shape = key.shape[1], tuple(given.shape)
    given = given.float()
    if given.numel() == 1 and given.dim() < 3:
        return given.reshape(1, 1)
    if shape == (heads,):
        return given[None].expand(sequences, heads)
    if len(shape) == 2 and shape[0] in (1, sequences) and shape[1] in (1, heads):
        return given.expand(sequences, heads)
    of_each = {
        ATTENTION: tuple(key.shape[:3]),
        VARLEN: (key.shape[2], heads),
        PAGED: (key.shape[0], key.shape[2], heads),
    }[form]
    if shape == of_each:
        return given if form == ATTENTION else given.T[None] if form == VARLEN else given.transpose(1, 2)
    raise ValueError(
        f"{name} must be a number, [kv_heads], [batch, kv_heads] or {FORMS[form]}, here {[sequences, heads]} or "
        f"{list(of_each)}, not {list(shape)}."
    )


MOST_NUMBERS = 1 << 16
"""Scales that are numbers of which a tensor is kept, 512 bytes each: a model has two a layer. None is let go, as a
captured graph may read it."""
_numbers: dict[tuple[torch.device, float], Tensor] = {}


def tensor_of_number(value: float, key: Tensor) -> Tensor:
    """A scale `[1, 1]`, where key is. Kept for the next call, as a fill is a launch: two took 1.9 µs of 5.6 over a
    short cache (an H200, 2026-11-29). What is traced or captured gets one of its own."""
    if torch.compiler.is_compiling() or not is_ordinary(key, key, key):
        return torch.full((1, 1), value, dtype=torch.float32, device=key.device)
    if (kept := _numbers.get((key.device, value))) is not None:
        return kept
    with torch.inference_mode(False):  # of the first call; the next ones may be outside of it
        made = torch.full((1, 1), value, dtype=torch.float32, device=key.device)
    captured = key.is_cuda and torch.cuda.is_current_stream_capturing()
    if not captured and type(made) is Tensor and len(_numbers) < MOST_NUMBERS:
        if key.is_cuda:
            torch.cuda.current_stream(key.device).synchronize()  # once: calls on other streams read it, too
        _numbers[key.device, value] = made
    return made


def _of_each_key(scale: Tensor, shape: tuple[int, ...], call: Call) -> Tensor:
    """A scale of more, as one of each key without a copy. Raises `ValueError` where sequences lie apart from where
    their scales do."""
    if scale.numel() > 1 and _form(call) != ATTENTION:
        raise ValueError("k_scale and v_scale must both be of each key, or neither, of packed sequences and pages.")
    return scale[..., None].expand(shape)


def dequantised(call: Call) -> Call:
    """The call as torch computes it: keys and values in query's dtype, times their scales; of pages those of the
    table's sequences, each with a copy of its own. Nothing waits for the device."""
    query, key, value = call.query, call.key, call.value
    scales = [call.term(K_SCALE), call.term(V_SCALE)]
    terms = list(call.terms)
    if call.q_scaled:
        query = _query_of_scale(call, terms.pop())
    terms[K_SCALE] = terms[V_SCALE] = None
    table, starts = call.term(TABLE), call.term(STARTS_K)
    if table is not None:
        places = table.long().clamp(0, key.shape[0] - 1).flatten()
        key, value = (tensor.view(torch.uint8)[places].view(tensor.dtype) for tensor in (key, value))
        own = torch.arange(len(places), dtype=table.dtype, device=table.device)
        terms[TABLE] = own.view(table.shape)
        scales = [_of_pages(scale, places, table) for scale in scales]
    elif starts is not None:
        scales = [_of_rows(scale, starts, key.shape[2]) for scale in scales]
    made = []
    for tensor, scale in zip((key, value), scales, strict=True):
        if scale is None:  # K's own columns of a latent cache
            made.append(tensor)
            continue
        if scale.dim() == 4:
            scale = scale.repeat_interleave(SCALE_COLUMNS, -1)
        made.append((tensor.float() * scale[(..., *[None] * (4 - scale.dim()))]).to(query.dtype))
    kept = () if all(term is None for term in terms) else tuple(terms)
    return replace(call, query=query, key=made[0], value=made[1], terms=kept, finite=False, q_scaled=False)


def _query_of_scale(call: Call, scale: Tensor | None) -> Tensor:
    """Query of 8 bits as what it stands for, in the dtype of answers."""
    assert scale is not None
    query, starts = call.query, call.term(STARTS_Q)
    if starts is not None:
        scale = _of_rows(scale, starts, query.shape[2])
    of_heads = scale if scale.shape[1] == 1 else scale.repeat_interleave(query.shape[1] // scale.shape[1], 1)
    return (query.float() * of_heads[(..., *[None] * (4 - scale.dim()))]).to(ANSWERS)


def _of_pages(scale: Tensor | None, places: Tensor, table: Tensor) -> Tensor | None:
    """Of each page that the table names: `[pages, kv_heads or 1]`, or with dimensions of rows and columns."""
    if scale is None:
        return None
    if scale.dim() > 2:
        return scale[places]
    return scale if len(scale) == 1 else scale.repeat_interleave(table.shape[1], 0)


def _of_rows(scale: Tensor | None, starts: Tensor, rows: int) -> Tensor:
    """Of each row of packed sequences: `[1, kv_heads, rows]`, or one for all."""
    assert scale is not None
    if scale.dim() == 3 or len(scale) == 1:
        return scale
    ends = starts[1:].long()
    sequence = torch.bucketize(torch.arange(rows, device=scale.device), ends, right=True).clamp(max=len(ends) - 1)
    return scale[sequence].T[None]


Surely = Callable[[Any], bool]
"""Whether a condition on sizes holds. Within a trace these are symbols: there it is to hold for all of the graph's."""


def scored(
    call: Call, score: str, predicate: str, tables: dict[str, Tensor], blocks: str = "", lists: tuple[Tensor, ...] = ()
) -> Call:
    """The call with these expressions, and block lists if there are any."""
    own = Score.of_texts(score, predicate, tables) if score or predicate else None
    if own is None and not blocks:
        return call
    return replace(call, score=own, blocks=blocks, terms=behind(with_tables(call.terms, own), lists))


def with_added(
    call: Call, added: Bias | Slopes | None, tables: Mapping[str, Tensor], surely: Surely = bool
) -> Call | None:
    """The call with what is added as its own term; None where nothing is, or it is no argument of such a call. The
    gradient of a table is that of an expression."""
    table = None if added is None else tables[added.table]
    if added is None or table is None or table.requires_grad or not (call.term(SLOPES) is call.term(BIAS) is None):
        return None
    which = SLOPES if isinstance(added, Slopes) else BIAS
    term = _slopes(call, added, table, surely) if isinstance(added, Slopes) else _bias(call, added, table, surely)
    if term is None:
        return None
    terms = list(call.terms or (None,) * len(TERMS))
    terms[which] = term
    return replace(call, terms=tuple(terms))


def _slopes(call: Call, added: Slopes, table: Tensor, surely: Surely) -> Tensor | None:
    heads, distance = call.query.shape[1], call.key.shape[2] - call.query.shape[2]
    diagonal = 0 if call.mask == CAUSAL_UPPER_LEFT else distance
    if not (
        surely(added.offset == diagonal) and (added.is_absolute or call.causal) and surely(table.shape[0] >= heads)
    ):
        return None
    return table if surely(table.shape[0] == heads) else table[:heads]


def _bias(call: Call, added: Bias, table: Tensor, surely: Surely) -> Tensor | None:
    (batch, heads, rows, _), keys, kind = call.query.shape, call.key.shape[2], table.device.type
    whole = (*({"b": batch, "h": heads}[one] for one in added.by), rows, keys)
    rounded = has_autocast(kind) and autocast_dtype(kind, table) != table.dtype  # as tables are not
    if table.dtype != call.query.dtype or rounded or not surely(keys % BIAS_ROW_STEP == 0):
        return None
    if not all(surely(one == size) for one, size in zip(table.shape, whole, strict=True)) or not table.is_contiguous():
        return None
    if surely is bool and table.data_ptr() % ALIGNMENT:  # a trace has no addresses: such a bias is copied when it runs
        return None
    return table[:, None] if added.by == "b" else table
