"""The genes of large_head_mma, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class LargeHeadMmaGenes(Genes):
    """One config of `search_spaces/large_head_mma.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    DV_SPLIT: int
    SCORES: Literal["recompute", "cluster"]
    ROW_WARPS: int
    COLUMN_WARPS: int
    DIM_CHUNK: int
    KEY_CHUNK: int
    STAGES: int
    Q_PLACE: Literal["shared", "streamed"]
    SMEM_LAYOUT: Literal["swizzled", "padded"]
    RESCALE: Literal["always", "vote", "lazy"]
    BLOCK_ORDER: Literal["rows", "rows_reversed", "heads", "heads_reversed"]
    BLOCKS_PER_SM: int
