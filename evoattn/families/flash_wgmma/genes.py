"""The genes of flash_wgmma, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class FlashWgmmaGenes(Genes):
    """One config of `search_spaces/flash_wgmma.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    BLOCKS_PER_SM: int
    PRODUCER: Literal["warp", "warpgroup"]
    OVERLAP: bool
    PING_PONG: bool
    RESCALE: Literal["always", "lazy_5", "lazy_8", "lazy_after"]
    KEY_SPLIT: int
    SCHEDULE: Literal["single", "fixed", "claimed", "balanced"]
    TILE_ORDER: Literal["by_head", "heads_4", "heads_8", "heads_16", "all_heads"]
    CAUSAL_SKIP: bool
    POLYNOMIAL_EIGHTHS: int
    Q_IN_REGISTERS: bool
    STORE: Literal["tensor_map", "rows", "chunks"]
    PART_TILES: int = 0
    GROUP_ROWS: bool = False
