"""FlashAttention 3's functions, by evoattn's kernels: the same names, order of arguments, defaults, shapes and results.

`evoattn.integrations.flash_attn.install()` makes other libraries find them."""

from evoattn.integrations.flash_attn.version_3 import flash_attn_combine as flash_attn_combine
from evoattn.integrations.flash_attn.version_3 import flash_attn_func as flash_attn_func
from evoattn.integrations.flash_attn.version_3 import flash_attn_qkvpacked_func as flash_attn_qkvpacked_func
from evoattn.integrations.flash_attn.version_3 import flash_attn_varlen_func as flash_attn_varlen_func
from evoattn.integrations.flash_attn.version_3 import flash_attn_with_kvcache as flash_attn_with_kvcache
from evoattn.integrations.flash_attn.version_3 import get_scheduler_metadata as get_scheduler_metadata

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
