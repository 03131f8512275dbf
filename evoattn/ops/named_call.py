"""A call of arguments by their names."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from evoattn.ops.arguments import (
    K_SCALE,
    TERMS,
    aligned_mask_of,
    cap_of,
    mask_of,
    require_flags,
    scale_of,
    window_of,
)
from evoattn.ops.call import Call, of_pages, of_sequences, whole, with_tables
from evoattn.ops.eight_bits import with_scales

FLAGS = ("enable_gqa", "deterministic", "batch_invariant")
NO_SCALES = (None,) * (len(TERMS) - K_SCALE)
"""Of `Call.terms`: `with_scales` puts them in."""


def call_of(query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> Call:
    """The call of `evoattn.attention`, or with `block_table` of `evoattn.attention_paged`, with `cu_seqlens_q` of
    `evoattn.attention_varlen`, whose tensors these are then. `given` are the other arguments by their names, all that
    the functions but `attn_mask` and `dropout_p` have; those that are left out have their defaults.

    Raises `ValueError` and `TypeError` for what the functions refuse, but for tensors that do not fit: see
    `Call.require`.
    """
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
    return with_scales(Call(**fields), get("k_scale"), get("v_scale"))
