"""The one table of samplers."""

from __future__ import annotations

from collections.abc import Callable

from evoattn.model.errors import WrongUse
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import SearchSpace
from evoattn.samplers.base import Sampler
from evoattn.samplers.genetic import GeneticSampler
from evoattn.samplers.pool import WhyInvalid
from evoattn.samplers.random import RandomSampler
from evoattn.samplers.tpe import TpeSampler


class SamplerError(WrongUse):
    """A sampler that is not in the table: its message is one sentence."""


SAMPLERS: dict[str, Callable[..., Sampler]] = {"genetic": GeneticSampler, "tpe": TpeSampler, "random": RandomSampler}


def make_sampler(
    name: str, spaces: dict[str, SearchSpace], problem: AttentionProblem, seed: int, why_invalid: WhyInvalid
) -> Sampler:
    """The sampler called `name` over the spaces of some families. Raises `SamplerError` on an unknown one.

    `why_invalid(family, params)` says in one sentence why a config cannot be, or None.
    """
    if name not in SAMPLERS:
        raise SamplerError(f"Unknown sampler {name!r}; evoattn has {', '.join(SAMPLERS)}.")
    return SAMPLERS[name](spaces, problem, seed, why_invalid)
