"""The typed side of a config: what the genes of all families have in common."""

from __future__ import annotations

from typing import Any, Self

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
        """The genes of a config. Raises `TypeError` where it has not the parameters of this family.

        They stay with the config: a pick asks a family some ten questions about each, and a dataclass that is frozen
        takes 3 µs to make.
        """
        made = vars(config).get("_genes")
        if type(made) is not cls:
            make: Any = cls
            if config.params.keys() == make.__dataclass_fields__.keys():
                made = object.__new__(cls)
                vars(made).update(config.params)
            else:
                made = make(**config.params)
            vars(config)["_genes"] = made
        found: Self = made
        return found

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
