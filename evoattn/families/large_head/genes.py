"""The genes of large_head, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class LargeHeadGenes(Genes):
    """One config of `search_spaces/large_head.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    DIM_SPLIT: int
    EXCHANGE: Literal["none", "cluster", "workspace"]
    DEPENDENT_LAUNCH: bool
    MATH: Literal["fma", "tf32x3", "tf32x3_spread"]
    WARPS: int
    LANES: int
    SCORE_ROWS: int
    SCORE_KEYS: int
    VALUE_THREADS: int
    Q_PLACE: Literal["shared", "global"]
    STAGES: int
    UNROLL: int
