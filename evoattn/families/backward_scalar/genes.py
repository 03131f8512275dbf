"""The genes of backward_scalar, typed."""

from __future__ import annotations

from dataclasses import dataclass

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class BackwardScalarGenes(Genes):
    """One config of `search_spaces/backward_scalar.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    THREADS: int
    BLOCKS_PER_SM: int
