"""What the cost model lets expect of a config, before anything was measured on the problem."""

import math

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.samplers.base import Prior
from evoattn.samplers.pool import Params

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
