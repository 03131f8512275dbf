"""One kernel of a group of problems, and what is known of it; and how alike two problems are to a kernel, by numbers of
tiles, rows and keys: a search of several problems times a kernel on those first that are most like its own."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

TILE_ROWS = 128
"""Rows of the tiles that are counted: the middle of what the families use."""
SCALES = {
    "queries": 0.5,
    "keys": 0.7,
    "rows per SM": 0.6,
    "tiles per SM": 1.0,
    "last wave": 1.0,
    "K/V heads per SM": 0.5,
    "group": 0.5,
}
"""Weight of each feature in `distance`."""


def row_tiles(problem: AttentionProblem) -> int:
    """Tiles of rows of one head in all batches. A packed sequence fills half of its last one, in the mean."""
    if problem.varlen:
        return math.ceil(problem.head_rows[0] / TILE_ROWS + problem.batch / 2)
    return math.ceil(problem.seqlen_q / TILE_ROWS) * problem.batch


def _most_keys(problem: AttentionProblem) -> int:
    """The most keys that a query can see: under a window those that it shows beside the diagonal."""
    past, ahead = problem.masking.past, problem.masking.ahead
    if past is None or ahead is None:
        return problem.seqlen_k
    before, behind = problem.causal_offset + problem.seqlen_q - 1, problem.seqlen_k - 1 - problem.causal_offset
    return max(1, min(problem.seqlen_k, min(past, before) + 1 + min(ahead, max(0, behind))))


def features(problem: AttentionProblem, gpu: GpuSpec) -> dict[str, float]:
    """Base-2 logarithms, and the part of the last wave of tiles that is filled (0 to 1). Keys are those that a query
    can see: no more than a window shows. Packed sequences have as many queries as they have in the mean."""
    waves = row_tiles(problem) * problem.heads / gpu.sm_count
    queries = problem.batch * problem.seqlen_q
    if problem.varlen:
        queries = max(1, problem.head_rows[0])
    return {
        "queries": math.log2(queries / problem.batch),
        "keys": math.log2(_most_keys(problem)),
        "rows per SM": math.log2(queries * problem.heads / gpu.sm_count),
        "tiles per SM": math.log2(waves),
        "last wave": waves - math.floor(waves) if waves > 1 else 1.0,
        "K/V heads per SM": math.log2(problem.batch * problem.kv_heads / gpu.sm_count),
        "group": math.log2(problem.group_size),
    }


def distance(a: dict[str, float], b: dict[str, float]) -> float:
    """Euclidean distance of two problems' features, each weighted by SCALES."""
    return math.sqrt(sum((scale * (a[name] - b[name])) ** 2 for name, scale in SCALES.items()))


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

    @cached_property
    def config(self) -> KernelConfig:
        return KernelConfig(self.family, self.params)

    @property
    def id(self) -> str:
        return self.config.id


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
