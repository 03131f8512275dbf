"""What tells one candidate from another."""

from __future__ import annotations

import hashlib

from evoattn.families.base import Family
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig


def behaviour(source_hash: str, family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str:
    """A sha256 in hex of a source's hash and of its launches: configs that share it are one kernel, called alike."""
    launches = family.launches(problem, config, gpu)
    return hashlib.sha256(f"{source_hash} {launches!r}".encode()).hexdigest()
