"""The genes of backward_mma, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class BackwardMmaGenes(Genes):
    """One config of `search_spaces/backward_mma.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    WARPS: int
    QUERY_WARPS: int
    PART: int
    CAUSAL_SKIP: bool
    STAGES: int
    SMEM_LAYOUT: Literal["swizzled", "padded"]
    KV_PLACE: Literal["shared", "v_registers", "registers"]
    DQ: Literal["add", "pass"]
    DQ_WARPS: int
    QUERY_SPLIT: int
    BLOCK_ORDER: Literal["keys", "heads"]
    BLOCKS_PER_SM: int
    PASS_M: int
    PASS_N: int
    PASS_WARPS: int
    PASS_STAGES: int
