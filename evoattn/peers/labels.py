"""The names of the peers, for people."""

PEER_NAMES = ("flash", "cudnn", "efficient", "math", "fa3", "fa4", "flex", "varlen", "flashinfer")
"""Those of `table.PEERS`, in its order. That module imports torch."""
SDPA = ("flash", "cudnn", "efficient", "math")
"""Those that `scaled_dot_product_attention` may run."""
FLASH_ATTENTION = {
    "fa3": "FlashAttention 3",
    "fa4": "FlashAttention 4",
    "flex": "FlexAttention",
    "varlen": "torch varlen_attn",
    "flashinfer": "FlashInfer",
}
"""Those of `table.PEERS` that are no SDPA backend."""


def peer_label(name: str) -> str:
    """A peer of `table.PEERS` by its full name, e.g. `SDPA cudnn`."""
    return FLASH_ATTENTION.get(name, f"SDPA {name}")
