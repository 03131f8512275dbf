"""The fields of a problem that make more of it than plain attention, and their values.

Sources: windows and ALiBi as in FlashAttention 2 (`window_size`, `alibi_slopes`), softcap as in Gemma 2, sinks as in
gpt-oss, the bias as `attn_mask` of `torch.nn.functional.scaled_dot_product_attention`, a head_dim of V and a V within K
as in DeepSeek V2's latent attention, used lengths and pages as `seqused_k` and `block_table` of FlashAttention 3,
packed sequences as its `flash_attn_varlen_func`.
"""

from __future__ import annotations

import re

SCORE_VARIANTS = ("window", "softcap", "sink", "alibi", "bias")
"""Those that change scores: `templates/device/mask.cuh` and `score.cuh` serve them."""
KEY_VARIANTS = ("seqused", "page")
"""Those that say which keys there are and where they lie."""
VARIANTS = (*SCORE_VARIANTS, "value_dim", "shared_kv", *KEY_VARIANTS, "varlen")
"""Each is compiled into a kernel where it is asked for, and a family says which it serves (`Family.variants`)."""
BIASES = ("s", "hs", "bs", "bhs")
"""Dimensions over which a bias differs: b batches, h heads, s queries and keys; it is broadcast over the others."""
PAGES = (16, 32, 64, 128, 256)
"""How many keys a page may have: powers of two, a multiple of 16."""
_WINDOW = re.compile(r"(\d{1,9}):(\d{1,9})", re.ASCII)


def parse_window(text: str) -> tuple[int, int]:
    """(past, ahead) of `past:ahead`, e.g. `128:0`. Raises `ValueError` on anything else."""
    if match := _WINDOW.fullmatch(text):
        return int(match[1]), int(match[2])
    raise ValueError(f"{text!r} is no window of two whole numbers, past:ahead.")
