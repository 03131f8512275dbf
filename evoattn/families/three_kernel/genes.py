"""The genes of three_kernel, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class ThreeKernelGenes(Genes):
    """One config of `search_spaces/three_kernel.yaml`, which says what each gene means."""

    PRODUCT: Literal["mma", "wgmma"]
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    WARPS_M: int
    WARPS_N: int
    TILES_A_BLOCK: int
    S_TYPE: Literal["fp16", "bf16", "fp32"]
    SOFTMAX: Literal["rewrite", "statistics", "tiles", "tiles_late"]
    P_PLACE: Literal["in_place", "own"]
    THREADS_PER_ROW: int
    ROWS_PER_BLOCK: int
    VECTOR_WIDTH: int
    KEPT_VECTORS: int
    PV_BLOCK_M: int
    PV_BLOCK_K: int
    PV_WARPS: int
    PV_STAGES: int
    HEAD_ORDER: Literal["forward", "zigzag"]
    DEPENDENT_LAUNCH: Literal["none", "early", "late"]
