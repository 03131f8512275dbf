"""The one table of samplers. A sampler is imported when it is made: optuna takes a third of a second."""

from __future__ import annotations

from collections.abc import Callable

from evoattn.model.errors import WrongUse
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import SearchSpace
from evoattn.samplers.base import Sampler
from evoattn.samplers.pool import WhyInvalid

MakeSampler = Callable[[dict[str, SearchSpace], AttentionProblem, int, WhyInvalid], Sampler]


class SamplerError(WrongUse):
    """A sampler that is not in the table: its message is one sentence."""


def _genetic(spaces: dict[str, SearchSpace], problem: AttentionProblem, seed: int, why_invalid: WhyInvalid) -> Sampler:
    from evoattn.samplers.genetic import GeneticSampler

    return GeneticSampler(spaces, problem, seed, why_invalid)


def _tpe(spaces: dict[str, SearchSpace], problem: AttentionProblem, seed: int, why_invalid: WhyInvalid) -> Sampler:
    from evoattn.samplers.tpe import TpeSampler

    return TpeSampler(spaces, problem, seed, why_invalid)


def _random(spaces: dict[str, SearchSpace], problem: AttentionProblem, seed: int, why_invalid: WhyInvalid) -> Sampler:
    from evoattn.samplers.random import RandomSampler

    return RandomSampler(spaces, problem, seed, why_invalid)


SAMPLERS: dict[str, MakeSampler] = {"genetic": _genetic, "tpe": _tpe, "random": _random}


def require_sampler(name: str) -> None:
    """Raises `SamplerError` unless `name` is in the table."""
    if name not in SAMPLERS:
        raise SamplerError(f"Unknown sampler {name!r}; evoattn has {', '.join(SAMPLERS)}.")


def make_sampler(
    name: str, spaces: dict[str, SearchSpace], problem: AttentionProblem, seed: int, why_invalid: WhyInvalid
) -> Sampler:
    """The sampler called `name` over the spaces of some families. Raises `SamplerError` on an unknown one.

    `why_invalid(family, params)` says in one sentence why a config cannot be, or None.
    """
    require_sampler(name)
    return SAMPLERS[name](spaces, problem, seed, why_invalid)
