"""`attn_implementation="evoattn"` for Hugging Face transformers.

import evoattn.integrations.transformers
evoattn.integrations.transformers.register()
model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="evoattn")

Layers without a mask tensor run `evoattn.attention`: prefill of causal decoders, also with sliding windows, sinks
(gpt-oss) and soft-capped scores (Gemma 2), decoding with a growing cache, encoders and vision models, cross attention,
position biases (T5); and steps over a static cache, with or without padding, in `generate` too, where a kernel serves
keys in use. Mask tensors of texts of an encoder with padding behind them, of prompts with padding on one side, and of
what a causal mask or a window hides, say so to `attention_forward`, which runs a kernel where one serves that
(`padded_batch.py`). Other masks of bools become block lists (`listed_mask.py`). Gradients of all but cached steps are
kernels', where these serve them. Other mask tensors and dropout take what "sdpa" takes; with sinks and soft caps, which
"sdpa" leaves out without a word, what "eager" computes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from evoattn.integrations import by_hand, listed_mask, mask_kinds, model_code, own_attention, padded_batch, static_cache
from evoattn.integrations.static_cache import MOST_QUERIES, filled_places, kernel_serves, padded_places, places_of
from evoattn.ops.attention import attention
from evoattn.ops.torch_answer import NoKernel

NAME = "evoattn"


def register() -> None:
    """Make the name known to transformers, as attention and as mask function; a model without the latter would get no
    mask at all. Models that do not look a name up there get another one, with a warning (`own_attention.py`)."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask)
    own_attention.look_after(NAME)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., bool] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **others: object,
) -> Tensor | None:
    """See `transformers.masking_utils.sdpa_mask`, which makes a mask tensor in every compiled or captured forward
    pass.

    Without padding or a filled cache no tensor is needed there either: None then, and `attention_forward` masks by
    `is_causal`, and by the `sliding_window` that models hand to it, as FlashAttention in transformers does. The same
    for the last query alone, behind all keys of its cache, and where all keys are seen. An exported program keeps the
    tensor of a causal mask, since it may be called with a single query. Other tensors carry what kernels take instead,
    if there is such a thing."""
    config = others.get("config")
    window = model_code.window_of(config)
    allow_is_causal_skip = allow_is_causal_skip and model_code.says_causal(config)
    allow_is_causal_skip = allow_is_causal_skip and not model_code.wants_masks(type(config))
    asked: dict[str, Any] = dict(others, batch_size=batch_size, q_length=q_length, kv_length=kv_length)
    asked |= dict(q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask)
    asked |= dict(local_size=local_size, allow_is_causal_skip=allow_is_causal_skip)
    made: Tensor | None
    if not model_code.takes_attention(type(config)):
        calls = model_code.calls_interface(type(config))
        if calls:  # and with no mask could not say that it is not causal
            asked["allow_is_bidirectional_skip"] = False
        made = _with_versions(eager_mask, asked)
        if calls and made is not None:
            mask_kinds.mark(made, attention_mask, mask_function, q_offset, kv_offset, local_size, window)
        return made
    everything = attention_mask is None and bool(others.get("allow_is_bidirectional_skip")) and local_size is None
    if everything and mask_kinds.is_same(mask_function, bidirectional_mask_function):
        return None
    known = attention_mask is None and isinstance(q_offset, int) and allow_is_causal_skip
    if known and local_size is not None and kv_length >= local_size:
        known = mask_kinds.is_same(mask_function, sliding_window_causal_mask_function(local_size))
        known = known and model_code.hands_on_windows(type(config))
    causal = mask_function, causal_mask_function
    if isinstance(q_offset, Tensor) and kv_offset == 0 and mask_kinds.is_same(*causal):
        places = _step_of_cache(batch_size, q_length, kv_length, q_offset, attention_mask, others)
        if places is not None:
            return places
    whole = known and q_offset == 0 and kv_offset == 0 and q_length == kv_length
    last = known and local_size is not None and q_length == 1 and kv_offset + kv_length == int(q_offset) + 1
    if (whole or last) and not model_code.is_exporting():
        return None
    made = _with_versions(sdpa_mask, asked)
    if made is None:
        return None
    step = q_length == 1 and attention_mask is not None and kv_offset == 0 and not torch.compiler.is_compiling()
    if step and isinstance(q_offset, int) and q_offset + 1 == kv_length and mask_kinds.is_same(*causal):
        filled = torch.full((), q_offset, device=made.device)  # all places of a growing cache are
        places = _step_of_cache(batch_size, q_length, kv_length, filled, attention_mask, others)
        if places is not None:
            return places
    mask_kinds.mark(made, attention_mask, mask_function, q_offset, kv_offset, local_size, window)
    return made


def _with_versions(make: Callable[..., Tensor | None], asked: dict[str, Any]) -> Tensor | None:
    """A mask tensor that counts how often it was written to, which tensors that are made in inference mode do not."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return make(**asked)
    with torch.inference_mode(False), torch.no_grad():
        return make(**asked)


def _step_of_cache(
    batch: int, queries: int, places: int, offset: Tensor, padding: Tensor | None, others: Mapping[str, object]
) -> Tensor | None:
    """What takes the place of a mask tensor in a step over a cache, static or with padding; None where a mask tensor is
    needed.

    `generate` always gives a padding mask `[batch, keys so far]`, whose values are on the device. A step of one token
    hides by a bias what they say is padding, so that nothing is read back whether or not there is any."""
    dtype = others.get("dtype")
    if model_code.is_exporting() or queries > (MOST_QUERIES if padding is None else 1):
        return None
    if padding is not None and (padding.dim() != 2 or padding.dtype != torch.bool):
        return None
    if padding is not None and torch.is_autocast_enabled(offset.device.type):
        return None  # queries would be of another dtype than the bias, whose bits they would read as theirs
    step = batch, queries, places, dtype, offset.device
    config = others.get("config")
    if model_code.wants_masks(type(config)) or not kernel_serves(config, *step, padding is not None):
        return None
    if padding is None:
        return filled_places(batch, queries, offset)
    assert isinstance(dtype, torch.dtype)
    return padded_places(batch, offset, padding, places, dtype)


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """See `transformers.integrations.sdpa_attention.sdpa_attention_forward`.

    query `[batch, heads, seqlen_q, head_dim]`, key and value with `kv_heads` instead; the answer is `[batch, seqlen_q,
    heads, head_dim]`, contiguous. `s_aux` holds a sink per head: one more score in every row's softmax, with no value.
    `indices` `[batch, seqlen_q, count]` are the only keys that each query sees (DeepSeek V3.2), `block_indices`
    `[batch, kv_heads, seqlen_q, count]` the only blocks of keys (MiniMax M3)."""
    decoder = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    causal = query.shape[2] > 1 and decoder
    seen = places_of(attention_mask, query.shape[0], key.shape[2], query.dtype)
    if seen is not None:
        if not dropout and position_bias is None and indices is None and block_indices is None:
            out = static_cache.attention(query, key, value, seen, scaling, softcap or 0.0, s_aux)
            return out.transpose(1, 2).contiguous(), None
        attention_mask = seen.as_mask(query.shape[2], key.shape[2])
    window = _window(module, sliding_window, key.shape[2]) if decoder else None
    if block_indices is not None:
        positions: Any = others.get("position_ids")
        attention_mask = by_hand.of_blocks(module, block_indices, attention_mask, query, key, positions)
    if indices is not None:
        attention_mask = by_hand.selected(indices, attention_mask, query, key, causal)
    padded = padded_batch.padded_of(attention_mask, query, key)
    if padded is not None and not dropout:
        served = padded_batch.attention(query, key, value, padded, scaling, softcap or 0.0, s_aux, position_bias)
        if served is not None:
            return served, None
    selects = indices is not None or block_indices is not None
    if attention_mask is not None and not dropout and position_bias is None and not selects:
        served = listed_mask.attention(query, key, value, attention_mask, scaling, softcap or 0.0, s_aux)
        if served is not None:
            return served, None
    if dropout and attention_mask is None and window is not None:
        attention_mask = by_hand.window_mask(query, key, window)
    if (softcap is not None or s_aux is not None) and (attention_mask is not None or dropout):
        terms = softcap, s_aux, position_bias
        return by_hand.attention(query, key, value, attention_mask, dropout, scaling, causal, *terms), None
    if attention_mask is not None or dropout:
        answer, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            position_bias=position_bias,
            sliding_window=sliding_window,
            **others,
        )
        return answer, None
    if causal and key.shape[2] > query.shape[2]:  # an empty static cache: what lies beyond the queries is masked
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        position_bias = None if position_bias is None else position_bias[..., : query.shape[2]]
    served = _without_mask(query, key, value, causal, scaling, window, (softcap, s_aux, position_bias))
    if served is not None:
        return served, None
    answer, _ = sdpa_attention_forward(  # which makes the mask of a bias in half the CPU time that `attention` takes
        module, query, key, value, None, scaling=scaling, is_causal=is_causal, position_bias=position_bias
    )
    return answer, None


def _window(module: torch.nn.Module, window: int | None, keys: int) -> int | None:
    """The window that a layer of a decoder hands on; None where it hides nothing, or where the mask tensor has it, or
    nobody: "sdpa" knows no windows."""
    if not window or window >= keys:
        return None
    return window if model_code.hands_on_windows(type(getattr(module, "config", None))) else None


def _without_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scaling: float | None,
    window: int | None,
    terms: tuple[float | None, Tensor | None, Tensor | None],
) -> Tensor | None:
    """The answer `[batch, seqlen_q, heads, head_dim]` to a call without a mask tensor; None where a bias alone asks for
    more than SDPA and no kernel serves it. `terms`: soft cap, sinks and bias."""
    softcap, s_aux, position_bias = terms
    variant = softcap is not None or s_aux is not None or window is not None
    as_sdpa = position_bias is not None and not variant and not torch.compiler.is_compiling()
    try:
        out = attention(
            query,
            key,
            value,
            is_causal=causal,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
            strict=as_sdpa,
            window=None if window is None else (window - 1, -1),
            softcap=softcap or 0.0,
            sinks=s_aux,
            bias=position_bias,
        )
    except NoKernel:
        return None
    return out.transpose(1, 2).contiguous()
