"""The typed side of a config: what the genes of all families have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from evoattn.model.space import KernelConfig, Value


class Genes:
    """Base of a family's genes: a frozen dataclass with an attribute for each parameter, by its name in the YAML.

    A `KernelConfig` is what is sampled and stored; a family reads it through its genes. A test holds names, types and
    values against `search_spaces/`.
    """

    BLOCK_M: int
    """Queries of a tile, in every family."""
    BLOCK_N: int
    """Keys of a tile, in every family."""

    @classmethod
    def of(cls, config: KernelConfig) -> Self:
        """The genes of a config. Raises `TypeError` where it has not the parameters of this family."""
        make: Callable[..., Self] = cls
        return make(**config.params)

    def value(self, name: str) -> Value:
        """The gene called `name`, for loops over several."""
        value: Value = getattr(self, name)
        return value

    def number(self, name: str) -> int:
        """The gene called `name`, which is a number."""
        value = self.value(name)
        assert isinstance(value, int), name
        return value

    def named(self, *names: str) -> dict[str, Value]:
        """Several genes by name, as a template takes them."""
        return {name: self.value(name) for name in names}
