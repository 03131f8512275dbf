"""The genes of split_kv, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class SplitKvGenes(Genes):
    """One config of `search_spaces/split_kv.yaml`, which says what each gene means."""

    COMPUTE: Literal["mma", "fma"]
    LOAD: Literal["registers", "cp_async", "tma"]
    BLOCK_M: int
    BLOCK_N: int
    WARPS: int
    STAGES: int
    VECTOR_BYTES: int
    DOT_LANES: int
    SPLITS: int
    MERGE: Literal["kernel", "last_block", "cluster"]
    DEPENDENT_LAUNCH: Literal["none", "early", "late"]
    BLOCKS_PER_SM: int
