"""One kernel of a group of problems, and what is known of it."""

from dataclasses import dataclass, field
from typing import Any

from evoattn.engine.alike import distance, features
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, config_id


@dataclass
class Kernel:
    """A config that was compiled for one group. `times` are µs per call by the problem's index in its group."""

    family: str
    params: dict[str, Any]
    origin: str = "random"
    """`given`, `random`, `mutation`, `crossover`, `aimed`, or of climbs `climbed`, `rival`, `behind` and `beside`."""
    state: str = "new"
    """`right` once it passed its check; else why it did not, as `wrong: …`, `compile: …`, `launch: …`."""
    registers: int = 0
    spill_bytes: int = 0
    times: dict[int, float] = field(default_factory=dict)
    rough: set[int] = field(default_factory=set)
    """Problems whose time is one call's: far behind the best, so that more would say nothing."""
    compile_seconds: float = 0.0
    """In a compile process; 0 where the machine code was there."""
    device_seconds: float = 0.0
    """In the GPU process, over all problems."""

    @property
    def config(self) -> KernelConfig:
        return KernelConfig(self.family, self.params)

    @property
    def id(self) -> str:
        return config_id(self.family, self.params)


@dataclass
class Group:
    """Problems that one compiled kernel can serve: equal dtype, head_dim and mask.

    `spent` counts what the group has cost, `weight` the share that it is due."""

    name: str
    problems: list[AttentionProblem]
    families: tuple[str, ...]
    weight: float = 1.0
    kernels: dict[str, Kernel] = field(default_factory=dict)
    given: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Configs to try first, (family, params)."""
    spent: float = 0.0

    def near(self, gpu: GpuSpec) -> list[list[int]]:
        """For each problem the others' indexes, the most alike on `gpu` first (`features`)."""
        points = [features(p, gpu) for p in self.problems]
        indexes = range(len(points))
        return [sorted((j for j in indexes if j != i), key=lambda j: distance(points[i], points[j])) for i in indexes]

    def best(self, index: int) -> float:
        """The least time of problem `index` so far, in µs; infinity where none is known."""
        return min((k.times[index] for k in self.kernels.values() if index in k.times), default=float("inf"))

    def leaders(self, index: int, count: int) -> list[Kernel]:
        """The `count` fastest right kernels of problem `index`."""
        timed = [k for k in self.kernels.values() if index in k.times and index not in k.rough]
        return sorted(timed, key=lambda k: k.times[index])[:count]
