"""The genes of flash_mma, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class FlashMmaGenes(Genes):
    """One config of `search_spaces/flash_mma.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    WARPS: int
    KEY_WARPS: int
    STAGES: int
    SCHEDULE: Literal["split", "split_short_v", "together", "overlapped"]
    SMEM_LAYOUT: Literal["swizzled", "padded"]
    Q_PLACE: Literal["shared", "registers", "direct"]
    RESCALE: Literal["always", "vote", "lazy"]
    ROW_SUM: Literal["add", "mma"]
    O_STORE: Literal["direct", "shared"]
    BLOCK_ORDER: Literal["rows", "rows_reversed", "heads", "heads_reversed"]
    BLOCKS_PER_SM: int
