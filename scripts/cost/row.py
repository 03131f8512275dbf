"""A measured time, and of which kernel on which GPU."""

from __future__ import annotations

from dataclasses import dataclass

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig


@dataclass(frozen=True)
class Row:
    """One kernel timed on one problem."""

    gpu: GpuSpec
    problem: AttentionProblem
    config: KernelConfig
    registers: int
    spill_bytes: int
    us: float
    source: str
    """`campaign`: found by a search, so mostly good. `landscape`: good and bad alike."""
    saved: str = ""
    """The day on which it was saved, as 2026-11-23."""

    @property
    def family(self) -> str:
        return self.config.family
