"""The genes of backward_wgmma, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class BackwardWgmmaGenes(Genes):
    """One config of `search_spaces/backward_wgmma.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    DIM_GROUPS: int
    Q_STAGES: int
    DO_STAGES: int
    DS_STAGES: int
    BLOCKS_PER_SM: int
    PRODUCER: Literal["warp", "warpgroup"]
    ORDER: Literal["in_turn", "dp_first", "sums_first", "softmax_first"]
    TERMS_EARLY: bool
    P_PLACE: Literal["registers", "shared"]
    DS_PLACE: Literal["registers", "shared"]
    DQ_ROWS: Literal["queries", "dims"]
    DQ_SUM: Literal["registers", "bulk", "warp"]
    BLOCK_ORDER: Literal["keys", "heads"]
    ROTATE: bool
    ROW_WORK: Literal["launches", "spare_warps"] = "launches"
    STAGGER: bool = False
