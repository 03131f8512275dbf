"""The genes of flash_wmma, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class FlashWmmaGenes(Genes):
    """One config of `search_spaces/flash_wmma.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    ROW_WARPS: int
    COLUMN_WARPS: int
    THREADS_PER_ROW: int
    STAGES: int
    COPY: Literal["async", "registers"]
    PADDING_BYTES: int
    Q_PLACE: Literal["shared", "fragments"]
    O_PLACE: Literal["fragments", "shared"]
    BLOCKS_PER_SM: int
