"""What an exported kernel asks of `nvcc -arch` and of the GPU."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from evoattn.export.recorded import Recorded
from evoattn.model.launch import KernelLaunch, TensorMap

LOWEST_SM = 75
"""What nvcc 13 still builds for: families that run on any GPU ask for no more."""


@dataclass(frozen=True)
class Target:
    """The least compute capability as a number, e.g. 80, and its name, e.g. `sm_80`, or `sm_90a` and no other."""

    number: int
    name: str

    @classmethod
    def of(cls, recorded: Recorded) -> Target:
        """Out of the family's own words, e.g. `sm_80 and newer` or `sm_90a`, and of what this kernel needs beyond them:
        wgmma; or launches that overlap, of clusters, with tensor maps.
        """
        if "wgmma.mma_async.sync" in recorded.source:
            return cls(90, "sm_90a")
        found = re.search(r"sm_(\d+)a?", recorded.family.devices)
        least = (int(found[1]), found[0]) if found else (LOWEST_SM, f"sm_{LOWEST_SM}")
        return cls(*max(least, (90, "sm_90")) if any(_is_of_hopper(n) for n in recorded.launches) else least)

    @property
    def is_exact(self) -> bool:
        """Whether no newer GPU runs it."""
        return self.name.endswith("a")

    @property
    def words(self) -> str:
        """E.g. `sm_80 or newer`."""
        return self.name if self.is_exact else f"{self.name} or newer"

    @property
    def requirement(self) -> str:
        """An `#error` for an -arch that the kernel's instructions do not exist on."""
        return f"""
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < {self.number}0
#error "this kernel needs {self.name}: build with nvcc -arch={self.words}"
#endif
"""

    @property
    def guard(self) -> tuple[list[str], list[str]]:
        """(lines before, lines after) all device code of an `a` target.

        nvcc 13.0 asked for sm_90a compiles for compute_90 too, which must see none of it.
        """
        if not self.is_exact:
            return [], []
        return [f"#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM{self.number}_ALL)"], ["#endif"]

    @property
    def nvcc_flags(self) -> list[str]:
        """Flags without which nvcc would not compile for it; none where torch's own choice will do."""
        if not self.is_exact:
            return []
        digits = self.name.removeprefix("sm_")
        return [f"-gencode=arch=compute_{digits},code=sm_{digits}"]


def _is_of_hopper(launch: KernelLaunch) -> bool:
    return launch.overlaps or math.prod(launch.cluster) > 1 or any(isinstance(arg, TensorMap) for arg in launch.args)
