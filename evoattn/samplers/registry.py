"""The one table of samplers. A sampler is imported when it is made: optuna takes a third of a second."""

from collections.abc import Callable
from importlib import import_module

from evoattn.model.errors import WrongUse, unknown
from evoattn.samplers.base import Sampler, SamplerSetup

MakeSampler = Callable[[SamplerSetup], Sampler]


class SamplerError(WrongUse):
    """A sampler that is not in the table: its message is one sentence."""


def _lazy(module: str, name: str) -> MakeSampler:
    def make(setup: SamplerSetup) -> Sampler:
        sampler: Sampler = getattr(import_module(f"evoattn.samplers.{module}"), name)(setup)
        return sampler

    return make


SAMPLERS: dict[str, MakeSampler] = {
    "guided": _lazy("guided", "GuidedSampler"),
    "genetic": _lazy("genetic", "GeneticSampler"),
    "tpe": _lazy("tpe", "TpeSampler"),
    "random": _lazy("random", "RandomSampler"),
}


def require_sampler(name: str) -> None:
    """Raises `SamplerError` unless `name` is in the table."""
    if name not in SAMPLERS:
        raise SamplerError(unknown("sampler", name, SAMPLERS))


def make_sampler(name: str, setup: SamplerSetup) -> Sampler:
    """The sampler called `name`. Raises `SamplerError` on an unknown one."""
    require_sampler(name)
    return SAMPLERS[name](setup)
