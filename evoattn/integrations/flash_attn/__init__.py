"""FlashAttention's functions by evoattn: `evoattn.flash_attn` has those of version 3; `install` answers imports of
`flash_attn_interface` and `flash_attn`."""

from evoattn.integrations.flash_attn.modules import install as install
from evoattn.integrations.flash_attn.modules import uninstall as uninstall
