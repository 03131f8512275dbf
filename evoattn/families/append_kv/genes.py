"""The parameters of append_kv."""

from __future__ import annotations

from dataclasses import dataclass

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class AppendKvGenes(Genes):
    """One config of `search_spaces/append_kv.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    THREADS: int
    VECTOR_WIDTH: int
