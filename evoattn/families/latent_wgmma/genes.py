"""The genes of latent_wgmma, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evoattn.families.genes import Genes


@dataclass(frozen=True)
class LatentWgmmaGenes(Genes):
    """One config of `search_spaces/latent_wgmma.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    RESCALE: Literal["always", "lazy_5", "lazy_8"]
    SPLITS: int
    OVERLAP: bool = False
    Q_STEPS: int = 0
    WARPGROUPS: int = 2
    DEPENDENT_LAUNCH: bool = False
