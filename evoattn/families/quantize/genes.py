"""The genes of quantize, typed."""

from __future__ import annotations

from dataclasses import dataclass

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class QuantizeGenes(Genes):
    """One config of `search_spaces/quantize.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    THREADS: int
    VECTOR_WIDTH: int
    UNROLL: int
    LAUNCHES: int = 2
