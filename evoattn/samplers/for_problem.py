"""A sampler for a problem on a GPU, with all that it is lent. Imports no torch and no database, as the process that it
runs in starts beside those that do."""

from typing import Any

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, SearchSpace
from evoattn.samplers.base import Sampler, SamplerSetup
from evoattn.samplers.registry import make_sampler


def sampler_of(
    name: str, spaces: dict[str, SearchSpace], problem: AttentionProblem, gpu: GpuSpec, seed: int
) -> Sampler:
    """The sampler called `name` over `spaces`, told which configs cannot be and what the cost model lets expect.

    Raises `SamplerError` on an unknown one."""
    from evoattn.samplers.prior import cost_prior  # imports NumPy, for which who only passes this on does not wait

    def why_invalid(family: str, params: dict[str, Any]) -> str | None:
        return registry.lookup(family).why_invalid(problem, KernelConfig(family, params), gpu)

    return make_sampler(name, SamplerSetup(spaces, seed, why_invalid, cost_prior(problem, gpu)))
