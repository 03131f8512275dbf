"""The names of the peers, for people."""

from __future__ import annotations

FLASH_ATTENTION = {"fa3": "FlashAttention 3", "fa4": "FlashAttention 4"}
"""Those of `baselines.PEERS` that are no SDPA backend."""


def peer_label(name: str) -> str:
    """A peer of `baselines.PEERS` by its full name, e.g. `SDPA cudnn`."""
    return FLASH_ATTENTION.get(name, f"SDPA {name}")
