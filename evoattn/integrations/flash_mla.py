"""FlashMLA's decoding by evoattn: `flash_mla_with_kvcache` over latent caches in pages, of 16 bits or of 8 with scales.

A row of DeepSeek's cache of 8 bits ("FP8 with scale", github.com/deepseek-ai/FlashMLA) has 656 bytes: 512 numbers of
e4m3, four scales in float32, one of each 128 of them, and 64 rotary columns in bfloat16."""

import torch
from torch import Tensor

from evoattn.model.dtype import DTYPES
from evoattn.model.scales import SCALE_COLUMNS
from evoattn.ops.attention import attention_paged

LATENT, ROTARY = 512, 64
"""Columns."""
SCALES_AT, ROTARY_AT = LATENT, LATENT + LATENT // SCALE_COLUMNS * 4
ROW_BYTES = ROTARY_AT + 2 * ROTARY
E4M3, LARGEST = torch.float8_e4m3fn, DTYPES["e4m3"].largest


def quantize_latent(latent: Tensor) -> Tensor:
    """Rows of a latent cache `[…, 576]`, of which the last 64 columns are rotary ones, as uint8 `[…, 656]`.

    A scale takes the largest of its 128 numbers to the end of the range; of zeros it is 1. Rotary columns are rounded
    to bfloat16. Raises `ValueError` for another number of columns."""
    if latent.shape[-1] != LATENT + ROTARY:
        raise ValueError(f"latent must have {LATENT + ROTARY} columns, not {latent.shape[-1]}.")
    groups = latent[..., :LATENT].float().unflatten(-1, (-1, SCALE_COLUMNS))
    largest = groups.abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    parts = (groups / scales).to(E4M3).flatten(-2), scales.flatten(-2), latent[..., LATENT:].bfloat16()
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def latent_views(cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a cache of such rows, `[…, 656]` of any dtype of one byte: the rotary columns bfloat16 `[…, 64]`, the others
    float8_e4m3fn `[…, 512]` and their scales float32 `[…, 4]`, all in the cache's memory.

    Raises `ValueError` for what is no such cache."""
    if cache.element_size() != 1 or cache.shape[-1] != ROW_BYTES:
        raise ValueError(f"A cache of 8 bits has {ROW_BYTES} bytes a row, not {list(cache.shape)} of {cache.dtype}.")
    rows = cache.view(torch.uint8)
    numbers, scales = rows[..., :LATENT].view(E4M3), rows[..., SCALES_AT:ROTARY_AT].view(torch.float32)
    return rows[..., ROTARY_AT:].view(torch.bfloat16), numbers, scales


def get_mla_metadata(*_: object, **__: object) -> tuple[None, None]:
    """What FlashMLA's call takes between: nothing, as kernels share keys among blocks by the lengths on the device."""
    return None, None


def flash_mla_with_kvcache(  # noqa: PLR0913 — as FlashMLA has them
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    cache_seqlens: Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: object = None,
    num_splits: object = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The output `[batch, seqlen_q, heads, head_dim_v]` and the log-sum-exp, float32 `[batch, heads, seqlen_q]`.

    q is `[batch, seqlen_q, heads, 576]`, k_cache `[pages, page, 1, 576]` in its dtype or with `is_fp8_kvcache` `[pages,
    page, 1, 656]` of bytes, block_table int32 `[batch, most_pages]`, cache_seqlens int32 `[batch]`. `causal` aligns the
    last query with the last key. `evoattn.attention_paged` computes it, and says what it raises. Raises `ValueError`
    for `indices` (sparse attention), and beside 8 bits for another head_dim_v than 512 and another q than bfloat16."""
    if indices is not None:
        raise ValueError("indices: sparse attention is not there; leave them out.")
    caches: tuple[Tensor, Tensor, Tensor | None] = k_cache, k_cache[..., :head_dim_v], None
    if is_fp8_kvcache:
        if head_dim_v != LATENT:
            raise ValueError(f"head_dim_v of a cache of 8 bits is {LATENT}, not {head_dim_v}.")
        caches = latent_views(k_cache)
        if q.dtype != caches[0].dtype:
            raise ValueError(f"q beside a cache of 8 bits is bfloat16, as its rotary columns are, not {q.dtype}.")
    found = attention_paged(
        q, *caches[:2], block_table, cache_seqlens, scale=softmax_scale, causal=causal, v_scale=caches[2],
        return_lse=True,
    )  # fmt: skip
    assert isinstance(found, tuple)
    return found
