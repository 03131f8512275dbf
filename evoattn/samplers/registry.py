"""The one table of samplers. A sampler is imported when it is made: optuna takes a third of a second."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from evoattn.model.errors import WrongUse
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import SearchSpace
from evoattn.samplers.base import NO_AIDS, Sampler, SamplerAids
from evoattn.samplers.pool import WhyInvalid

MakeSampler = Callable[..., Sampler]
"""Called with the arguments of `ProposingSampler`."""


class SamplerError(WrongUse):
    """A sampler that is not in the table: its message is one sentence."""


def _lazy(module: str, name: str) -> MakeSampler:
    def make(
        spaces: dict[str, SearchSpace],
        problem: AttentionProblem,
        seed: int,
        why_invalid: WhyInvalid,
        aids: SamplerAids = NO_AIDS,
    ) -> Sampler:
        sampler: Sampler = getattr(import_module(f"evoattn.samplers.{module}"), name)(
            spaces, problem, seed, why_invalid, aids
        )
        return sampler

    return make


SAMPLERS: dict[str, MakeSampler] = {
    "guided": _lazy("guided", "GuidedSampler"),
    "forest": _lazy("guided", "ForestSampler"),
    "mixed": _lazy("mixed", "MixedSampler"),
    "local": _lazy("local", "LocalSampler"),
    "genetic": _lazy("genetic", "GeneticSampler"),
    "tpe": _lazy("tpe", "TpeSampler"),
    "random": _lazy("random", "RandomSampler"),
}


def require_sampler(name: str) -> None:
    """Raises `SamplerError` unless `name` is in the table."""
    if name not in SAMPLERS:
        raise SamplerError(f"Unknown sampler {name!r}; evoattn has {', '.join(SAMPLERS)}.")


def make_sampler(
    name: str,
    spaces: dict[str, SearchSpace],
    problem: AttentionProblem,
    seed: int,
    why_invalid: WhyInvalid,
    aids: SamplerAids = NO_AIDS,
) -> Sampler:
    """The sampler called `name` over the spaces of some families. Raises `SamplerError` on an unknown one.

    `why_invalid(family, params)` says in one sentence why a config cannot be, or None.
    """
    require_sampler(name)
    return SAMPLERS[name](spaces, problem, seed, why_invalid, aids)
