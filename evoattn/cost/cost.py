"""The cost model: one for every family, launch and gene. `cost(problem, config, gpu)` takes some 0.3 ms.

A cost orders candidates of one problem on one GPU; it is no time. The physical part says what each unit of the card has
to do (`physics.py`); trees, fitted to times measured on an H100 and an H200, correct what it leaves over
(`fitted.py`). `reports/cost_model.md` says how well that orders kernels, and of which cards nothing was measured."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from evoattn.cost.correction import ANYWHERE, MOST, Correction, correction_of, name_of
from evoattn.cost.features import features
from evoattn.cost.fitted import Fitted, Floats, Trees, load
from evoattn.cost.physics import Physics, physics
from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

BOUNDS = {
    "tensor": "tensor cores",
    "fp32": "CUDA cores",
    "special": "exponentials",
    "issue": "instruction issue",
    "shared": "shared memory",
    "l2": "L2",
    "dram": "DRAM",
    "chain": "latency",
    "fetch": "latency",
    "ends": "first loads and last stores",
    "launches": "launches",
}
"""What bounds a kernel, by the part that is largest."""
SHOWN, LEAST = 4, 0.05
"""Parts that a sentence names, and of what share."""
MOST_CORRECTION = 1.5
"""Natural logarithm: trees that ask for more stand before something that they never saw."""


@dataclass(frozen=True)
class Cost:
    """`score` is in µs as far as the model knows: good for comparing candidates of one problem and GPU, never for
    publishing."""

    score: float
    parts: dict[str, float]
    """What each unit would take alone, on the scale of `score`, by the words of `BOUNDS`. Units work beside one
    another, so that these add up to more."""
    bound: str
    """The word of the largest part."""
    correction: float
    """What the trees multiply the physical part by."""

    def sentence(self) -> str:
        """What bounds the kernel and how its score splits, for people."""
        (_, first), *rest = sorted(self.parts.items(), key=lambda item: -item[1])
        shown = [f"{name} {us / self.score:.0%}" for name, us in rest[: SHOWN - 1] if us >= LEAST * self.score]
        beside = f" What runs beside it, each alone: {', '.join(shown)}." if shown else ""
        return f"Bound by {self.bound}, which alone takes {first / self.score:.0%} of the relative cost.{beside}"


def cost(
    problem: AttentionProblem,
    config: KernelConfig,
    gpu: GpuSpec,
    registers: int = 0,
    spill_bytes: int = 0,
    fitted: Fitted | None = None,
) -> Cost | None:
    """The cost of a config that `why_invalid` lets through; None if no block of it fits on an SM.

    `registers` per thread and `spill_bytes` are the compiler's, if it was compiled: 0 registers stand for the family's
    estimate."""
    known = fitted or load()
    found = physical_part(problem, config, gpu, registers, known)
    if found is None:
        return None
    model = Model(gpu, known, correction_of(gpu))
    score = found.corrected(float(model.factors(problem, [config], [found], spill_bytes)[0]))
    correction = score / found.us
    parts: dict[str, float] = {}
    for name, us in found.parts.items():
        parts[BOUNDS[name]] = parts.get(BOUNDS[name], 0.0) + us * correction
    return Cost(score, parts, max(parts, key=lambda name: parts[name]), correction)


def scores(
    problem: AttentionProblem,
    configs: Sequence[KernelConfig],
    gpu: GpuSpec,
    fitted: Fitted | None = None,
    correction: Correction | None = None,
    within: float = math.inf,
) -> list[float]:
    """The `Cost.score` of many configs that were not compiled, infinite where no block fits; half the time of one by
    one. `correction`: that of the card's calibration unless given. Trees are asked of those whose physical part is
    `within` so many times the least of their family, unless that is beyond its square times the least of all; what they
    say of the others is taken to be the most that they say of these."""
    known, factors = fitted or load(), dict[int, float]()
    model = Model(gpu, known, correction_of(gpu) if correction is None else correction)
    parts = {i: part for i, c in enumerate(configs) if (part := physical_part(problem, c, gpu, 0, known))}
    least = min((part.us for part in parts.values()), default=0.0)
    for family in {configs[i].family for i in parts}:
        mine = [i for i in parts if configs[i].family == family]
        own = min(parts[i].us for i in mine)
        if own <= within * within * least:
            near = [i for i in mine if parts[i].us <= within * own]
            found = model.factors(problem, [configs[i] for i in near], [parts[i] for i in near])
            factors |= zip(near, found.tolist(), strict=True)
    most = max(factors.values(), default=1.0)
    return [parts[i].corrected(factors.get(i, most)) if i in parts else math.inf for i in range(len(configs))]


@lru_cache(maxsize=64)
def _without_expressions(problem: AttentionProblem) -> AttentionProblem:
    return problem.with_(score="", predicate="", tables="")


@dataclass(frozen=True)
class Model:
    """What corrects the physical part on a GPU: the trees that ship, and those of the card's calibration."""

    gpu: GpuSpec
    fitted: Fitted
    own: Correction

    def factors(
        self, problem: AttentionProblem, configs: Sequence[KernelConfig], parts: Sequence[Physics], spill_bytes: int = 0
    ) -> Floats:
        """What the trees of the configs' one family multiply the physical parts by, and what a calibration found of
        single kernels: 1 where there is neither.

        No kernel with expressions of a problem's own was measured for the trees that ship. Trees are asked of the
        problem without them, and what they add to the physical part stays as it is."""
        family = configs[0].family
        sums = [(trees, most) for trees, most in self._sums(family) if trees is not None]
        timed, others = self.own.timed(problem), self.own.kernels.get(ANYWHERE, {})
        if not sums and not timed and not others:
            return np.ones(len(parts))
        asked, plain = self.asked(problem, configs, parts, spill_bytes)
        names = map(name_of, configs if timed or others else ())
        logs = np.array([timed.get(name, others.get(name, 0.0)) for name in names] or [0.0] * len(parts))
        for trees, most in sums:
            rows = np.array([list(map(row.get, trees.names)) for row in asked], np.float64)  # NaN where a row lacks one
            logs += np.clip(trees.predict(rows), -most, most)
        shares: Floats = np.array([p.us / part.us for p, part in zip(plain, parts, strict=True)])
        found: Floats = 1 + (np.exp(logs) - 1) * shares
        return found

    def _sums(self, family: str) -> tuple[tuple[Trees | None, float], ...]:
        return (self.fitted.trees.get(family), MOST_CORRECTION), (self.own.trees.get(family), MOST)

    def asked(
        self, problem: AttentionProblem, configs: Sequence[KernelConfig], parts: Sequence[Physics], spill_bytes: int = 0
    ) -> tuple[list[dict[str, float]], list[Physics]]:
        """Features of each config on the problem without expressions, and its physical part there."""
        seen, plain, gpu = problem, list(parts), self.gpu
        if problem.score or problem.predicate:
            seen = _without_expressions(problem)
            found = [physical_part(seen, config, gpu, 0, self.fitted) for config in configs]
            plain = [one or part for one, part in zip(found, parts, strict=True)]
        return [features(seen, c, part, gpu, spill_bytes) for c, part in zip(configs, plain, strict=True)], plain


def physical_part(
    problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, registers: int, fitted: Fitted
) -> Physics | None:
    """The cost before the trees."""
    works = registry.lookup(config.family).work(problem, config, registers)
    return physics(works, gpu, fitted.weights_of(registry.weighed_as(config.family)))
