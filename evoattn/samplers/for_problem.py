"""A sampler for a problem on a GPU, with all that it is lent. Imports no torch and no database, as the process that it
runs in starts beside those that do."""

import math
from typing import Any

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, SearchSpace
from evoattn.samplers.base import Params, Prior, Sampler, SamplerSetup
from evoattn.samplers.registry import make_sampler


def sampler_of(
    name: str, spaces: dict[str, SearchSpace], problem: AttentionProblem, gpu: GpuSpec, seed: int
) -> Sampler:
    """The sampler called `name` over `spaces`, told which configs cannot be and what the cost model lets expect.

    Raises `SamplerError` on an unknown one."""
    from evoattn.samplers.for_problem import (
        cost_prior,  # imports NumPy, for which who only passes this on does not wait
    )

    def why_invalid(family: str, params: dict[str, Any]) -> str | None:
        return registry.lookup(family).why_invalid(problem, KernelConfig(family, params), gpu)

    return make_sampler(name, SamplerSetup(spaces, seed, why_invalid, cost_prior(problem, gpu)))


WORST = 3.0
"""Log of a score over the best for a kernel of which no block fits on an SM, and the most for any other."""


def cost_prior(problem: AttentionProblem, gpu: GpuSpec) -> Prior:
    """The log of each config's score (`evoattn.cost`) over the least of those that were asked first."""
    least: list[float] = []

    def prior(configs: list[tuple[str, Params]]) -> list[float]:
        from evoattn.cost.cost import scores  # here: its trees are read when they are first asked

        logs = [
            math.log(score) if math.isfinite(score) else math.inf
            for score in scores(problem, [KernelConfig(family, params) for family, params in configs], gpu)
        ]
        if not least and any(map(math.isfinite, logs)):
            least.append(min(logs))
        return [min(log - least[0], WORST) if least else WORST for log in logs]

    return prior
