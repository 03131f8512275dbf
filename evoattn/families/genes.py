"""The parameters of a family, said once: name, type, values, meaning and default; and a config with types."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self, get_args, get_type_hints

from evoattn.model.space import KernelConfig, Parameter, Value

SINCE_HOPPER = ("sm_90a", "sm_100", "sm_103", "sm_120", "sm_121")
"""Architectures with a tensor copy engine and launches that may begin early."""


class _Gene(NamedTuple):
    """What `gene` was told."""

    meaning: str
    values: tuple[Value, ...]
    default: Value | None
    only: Mapping[Value, Sequence[str]]


def gene(
    meaning: str,
    values: tuple[Value, ...] = (),
    default: Value | None = None,
    only: Mapping[Value, Sequence[str]] | None = None,
) -> Any:
    """The declaration of a parameter in a class of genes, whose annotation has its name and type.

    `values` are in ascending or natural order; of `bool` and `Literal[…]` they are those of the type. `default` is what
    configs did that were recorded before the parameter was there; None where it always was. `only` names the
    architectures of values that not all have."""
    return _Gene(meaning, values, default, only or {})


class Genes:
    """Base of a family's genes, which has an attribute for each parameter, declared by `gene`.

    A `KernelConfig` is what is sampled and stored; a family reads it through its genes, which nobody changes."""

    BLOCK_M: int
    """Queries of a tile, in every family."""
    BLOCK_N: int
    """Keys of a tile, in every family."""
    declared: ClassVar[Mapping[str, _Gene]] = {}
    """The parameters by name, in the order of the family's configs."""

    def __init_subclass__(cls) -> None:
        cls.declared = {**cls.declared} | {name: one for name, one in vars(cls).items() if isinstance(one, _Gene)}
        for name in vars(cls).keys() & cls.declared.keys():
            delattr(cls, name)

    def __init__(self, **params: Value) -> None:
        """Raises `TypeError` where these are not the family's parameters; those with a default may be missing."""
        declared = self.declared
        if params.keys() != declared.keys():
            params = {name: one.default for name, one in declared.items() if one.default is not None} | params
            if params.keys() != declared.keys():
                raise TypeError(f"{type(self).__name__} are {', '.join(declared)}, not {', '.join(params)}")
        vars(self).update(params)

    @classmethod
    def of(cls, config: KernelConfig) -> Self:
        """The genes of a config. Raises `TypeError` where it has not the parameters of this family. They stay with the
        config: a pick asks a family some ten questions about each."""
        found = vars(config).get("_genes")
        if not isinstance(found, cls):
            found = vars(config)["_genes"] = cls(**config.params)
        return found

    def with_(self, **changes: Value) -> Self:
        """The same with other values."""
        return type(self)(**{name: vars(self)[name] for name in self.declared} | changes)

    @classmethod
    @cache
    def parameters(cls, arch: str | None = None) -> tuple[Parameter, ...]:
        """What may be chosen on an architecture, or on any, in the order of the declarations."""
        kinds = get_type_hints(cls)
        found = []
        for name, (meaning, values, default, only) in cls.declared.items():
            known = values or ((False, True) if kinds[name] is bool else get_args(kinds[name]))
            here = tuple(value for value in known if arch is None or arch in only.get(value, (arch,)))
            found.append(Parameter(name, here, meaning, default))
        return tuple(found)

    def value(self, name: str) -> Value:
        """The gene called `name`, for loops over several."""
        value: Value = getattr(self, name)
        return value

    def number(self, name: str) -> int:
        """The gene called `name`, which is a number."""
        value = self.value(name)
        assert isinstance(value, int), name
        return value
