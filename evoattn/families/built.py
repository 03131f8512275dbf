"""A compiled kernel together with what is needed to launch it, and what tells it from another one."""

import hashlib
from dataclasses import dataclass

from evoattn.families.base import Family
from evoattn.model.gpu import GpuSpec
from evoattn.model.launch import KernelLaunch
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel
from evoattn.model.space import KernelConfig


@dataclass(frozen=True)
class BuiltKernel:
    """Machine code, and the family, config and GPU that say how it is launched for a problem. It can be pickled."""

    family: Family
    config: KernelConfig
    gpu: GpuSpec
    compiled: CompiledKernel

    def launches(self, problem: AttentionProblem) -> tuple[KernelLaunch, ...]:
        """See `Family.launches`."""
        return self.family.launches(problem, self.config, self.gpu)

    def workspace(self, problem: AttentionProblem) -> dict[str, int]:
        """Scratch buffers in bytes, by name: see `Family.workspace`."""
        return self.family.workspace(problem, self.config, self.gpu)

    def unordered(self, problem: AttentionProblem) -> tuple[str, ...]:
        """Outputs whose bits may differ from run to run: see `Family.unordered`."""
        return self.family.unordered(problem, self.config)


def behaviour(source_hash: str, family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str:
    """A sha256 in hex of a source's hash and of its launches: configs that share it are one kernel, called alike."""
    launches = family.launches(problem, config, gpu)
    return hashlib.sha256(f"{source_hash} {launches!r}".encode()).hexdigest()
