"""What families have in common whose blocks take BLOCK_M whole rows, each of them by some threads of a warp: operations
beside attention, which read and write a row once."""

import math
from abc import abstractmethod
from typing import ClassVar

from evoattn.families.base import Family
from evoattn.families.genes import Genes
from evoattn.families.residency import WARP
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem

MAX_HEAD_DIM = 1024
MOST_ROWS = (1 << 31) - 1


class RowGenes(Genes):
    """Base of their genes."""

    THREADS: int
    VECTOR_WIDTH: int

    def lanes(self, columns: int) -> tuple[int, int]:
        """(threads of a row, columns of it that each has), as in the templates."""
        vectors = math.ceil(columns / self.VECTOR_WIDTH)
        lanes = min(WARP, 1 << max(0, vectors - 1).bit_length())
        return lanes, math.ceil(vectors / lanes) * self.VECTOR_WIDTH

    def why_idle(self, lanes: int) -> str | None:
        """One sentence if more than a warp's threads have fewer rows than they could take, else None."""
        if self.BLOCK_M * lanes < self.THREADS and self.THREADS > WARP:
            return f"THREADS={self.THREADS} are more than the {self.BLOCK_M} rows of a block have work for."
        return None


class RowKernels(Family):
    """A `Family` of such kernels; a mask changes no launch."""

    devices: ClassVar[str] = "any GPU"
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16", "fp32")

    @abstractmethod
    def rows(self, problem: AttentionProblem) -> int:
        """Of all heads together."""

    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        if (columns := max(problem.head_dim, problem.head_dim_v)) > MAX_HEAD_DIM:
            return f"{self.name} takes a head_dim of up to {MAX_HEAD_DIM}, not {columns}."
        if (rows := self.rows(problem)) > MOST_ROWS:
            return f"{self.name} takes at most {MOST_ROWS} rows of all heads together, not {rows}."
        return None
