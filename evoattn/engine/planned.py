"""Kernels that were proposed and compiled before a campaign began, on a machine without a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from evoattn.backends.kernel_files import KernelFiles
from evoattn.engine.groups import Group, Kernel
from evoattn.families import registry
from evoattn.families.render import render
from evoattn.model.gpu import GpuSpec
from evoattn.model.records import Candidate, CompiledKernel


@dataclass
class Planned:
    """A config to try, and for which of its group's problems."""

    group: Group
    family: str
    params: dict[str, Any]
    target: int
    origin: str

    def kernel(self) -> Kernel:
        """A new one."""
        return Kernel(self.family, self.params, self.origin)

    def candidate(self, gpu: GpuSpec) -> Candidate:
        """Its source today."""
        problem = self.group.problems[self.target]
        return render(registry.lookup(self.family), problem, self.kernel().config, gpu)


class Ahead:
    """What a campaign takes from a plan (`evoattn/portfolio/measure.py`): kernels that are compiled already, which the
    GPU process times while no other waits for it, and what breeders propose first."""

    def __init__(self, planned: Iterable[Planned], files: KernelFiles, gpu: GpuSpec) -> None:
        """Of what is planned those whose machine code is among the files become new kernels of their groups, so that no
        breeder proposes them; the others their groups' `first`."""
        self._files = files
        self._waiting: deque[tuple[Planned, Kernel, Candidate]] = deque()
        for one in planned:
            kernel, candidate = one.kernel(), one.candidate(gpu)
            first = one.group.first.setdefault(one.target, [])
            if files.has(candidate):
                one.group.kernels[kernel.id] = kernel
                self._waiting.append((one, kernel, candidate))
            else:
                first.append((kernel.config, kernel.origin))

    @property
    def left(self) -> int:
        """Kernels that nobody took yet."""
        return len(self._waiting)

    def next(self) -> tuple[Planned, Kernel, Candidate, CompiledKernel] | None:
        """The next one and its machine code; None where none is left. One that cannot be read is passed over."""
        while self._waiting:
            one, kernel, candidate = self._waiting.popleft()
            if compiled := self._files.get(candidate):
                return one, kernel, candidate, compiled
        return None
