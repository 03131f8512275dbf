"""The genes of flash_scalar, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class FlashScalarGenes(Genes):
    """One config of `search_spaces/flash_scalar.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    THREADS_PER_ROW: int
    ROWS_PER_THREAD: int
    VECTOR_WIDTH: int
    PADDING: int
    KV_STAGES: int
    Q_IN_REGISTERS: bool
    P_IN_SHARED: bool
    BLOCK_ORDER: Literal["tiles", "heads"]
    BLOCKS_PER_SM: int
    UNROLL: int
