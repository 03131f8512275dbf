"""The parameters of merge_parts, and how threads share a row."""

from __future__ import annotations

import math
from dataclasses import dataclass

from evoattn.families.genes import Genes
from evoattn.families.residency import WARP
from evoattn.model.problem import AttentionProblem


@dataclass(frozen=True)
class MergePartsGenes(Genes):
    """One config of `search_spaces/merge_parts.yaml`, which says what each gene means."""

    BLOCK_M: int
    BLOCK_N: int
    THREADS: int
    VECTOR_WIDTH: int


def lanes_of(problem: AttentionProblem, genes: MergePartsGenes) -> tuple[int, int]:
    """(threads of a row, columns of it that each has), as in the template."""
    vectors = math.ceil(problem.head_dim / genes.VECTOR_WIDTH)
    lanes = min(WARP, 1 << (vectors - 1).bit_length())
    return lanes, math.ceil(vectors / lanes) * genes.VECTOR_WIDTH
