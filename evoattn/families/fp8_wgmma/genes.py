"""The genes of fp8_wgmma, typed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from evoattn.families.flash_wgmma.resources import FlashWgmmaGenes
from evoattn.families.genes import Genes


@dataclass(frozen=True)
class Fp8WgmmaGenes(Genes):
    """One config of `search_spaces/fp8_wgmma.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    STAGES: int
    BLOCKS_PER_SM: int
    OVERLAP: bool
    PING_PONG: bool
    SCHEDULE: Literal["single", "fixed", "claimed", "balanced"]
    TILE_ORDER: Literal["by_head", "heads_4", "heads_8", "heads_16", "all_heads"]
    CAUSAL_SKIP: bool
    POLYNOMIAL_EIGHTHS: int
    Q_IN_REGISTERS: bool
    STORE: Literal["tensor_map", "rows", "chunks"]
    FLUSH_TILES: int
    SUM_PLACE: Literal["registers", "shared"]

    @cached_property
    def flash(self) -> FlashWgmmaGenes:
        """Those that flash_wgmma has too: the parts that both families share read these."""
        shared = {name: value for name, value in vars(self).items() if name in FlashWgmmaGenes.__dataclass_fields__}
        return FlashWgmmaGenes(PRODUCER="warpgroup", RESCALE="always", KEY_SPLIT=1, **shared)
