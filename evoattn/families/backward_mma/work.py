"""What the kernels of backward_mma do: see `evoattn.families.work`."""

from __future__ import annotations

from evoattn.families.backward_mma.genes import BackwardMmaGenes
from evoattn.families.work import LaunchWork
from evoattn.model.problem import AttentionProblem


def launch_work(problem: AttentionProblem, genes: BackwardMmaGenes, registers: int) -> tuple[LaunchWork, ...]:
    """The three launches."""
    return ()
