"""Search spaces, and one choice of their parameters."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from evoattn.model.errors import WrongUse
from evoattn.model.paths import SEARCH_SPACES

Value = int | float | str | bool


class ConfigError(WrongUse):
    """A search space or config that cannot be: its message is one sentence."""


def config_id(family: str, params: dict[str, Value]) -> str:
    """sha256 (hex) of the canonical JSON of family and parameters: the identity that tells duplicates."""
    return hashlib.sha256(json.dumps([family, params], sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class KernelConfig:
    """One choice of a family's parameters. `config["BLOCK_M"]` reads one."""

    family: str
    params: dict[str, Value]

    def __getitem__(self, name: str) -> Value:
        return self.params[name]

    @cached_property
    def id(self) -> str:
        return config_id(self.family, self.params)

    def describe(self) -> str:
        """Short text for tables: `BLOCK_M=64 BLOCK_N=64 …`, in the space's order."""
        return self._words

    @cached_property
    def _words(self) -> str:
        return spelled(self.params)


@dataclass(frozen=True)
class Parameter:
    """One dimension of a search space: its values in ascending or natural order, and what it means."""

    name: str
    values: tuple[Value, ...]
    meaning: str
    default: Value | None = None
    """What configs did that were recorded before the parameter was there; None where it always was."""


@dataclass(frozen=True)
class SearchSpace:
    """The parameters of one family on one architecture, and known-good configs of it."""

    family: str
    parameters: tuple[Parameter, ...]
    starting: tuple[dict[str, Value], ...] = ()
    """Configs that a search may begin with, for problems of many kinds: most are invalid or slow for most problems.
    `search.starting` chooses."""

    @property
    def size(self) -> int:
        """Number of points, valid or not."""
        product = 1
        for p in self.parameters:
            product *= len(p.values)
        return product

    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters)

    def completed(self, params: dict[str, Value]) -> dict[str, Value]:
        """`params`, and the defaults of parameters that they lack: those added after they were recorded."""
        return {p.name: p.default for p in self.parameters if p.default is not None} | params

    def has(self, params: Mapping[str, Value]) -> bool:
        """Whether these are all of the space's parameters, each with one of its values."""
        return params.keys() == set(self.names()) and _lies_in(dict(params), self.parameters)

    def make_config(self, params: dict[str, Value]) -> KernelConfig:
        """The config with exactly this space's parameters, in its order; those with a default may be missing.

        Raises `ConfigError` on a missing, surplus or foreign value."""
        params = self.completed(params)
        missing = [p.name for p in self.parameters if p.name not in params]
        surplus = sorted(set(params) - set(self.names()))
        if missing or surplus:
            names = ", ".join(self.names())
            raise ConfigError(
                f"{self.family} needs exactly the parameters {names}; missing {missing}, surplus {surplus}."
            )
        for p in self.parameters:
            if params[p.name] not in p.values:
                raise ConfigError(f"{self.family}: {p.name}={params[p.name]!r} is not one of {list(p.values)}.")
        return KernelConfig(self.family, {p.name: params[p.name] for p in self.parameters})

    def restricted(self, choices: dict[str, tuple[str, ...]]) -> SearchSpace:
        """The part of the space where each named parameter has one of the chosen values, written as on the command
        line; names that the space lacks are passed over. A starting config outside of the part is left out.

        Raises `ConfigError` on a value that the parameter does not have."""
        parameters = []
        for p in self.parameters:
            spelled = {spelling(value): value for value in p.values}
            chosen = choices.get(p.name, tuple(spelled))
            if foreign := [text for text in chosen if text not in spelled]:
                raise ConfigError(f"{self.family}: {p.name}={foreign[0]} is not one of {', '.join(spelled)}.")
            parameters.append(replace(p, values=tuple(value for text, value in spelled.items() if text in chosen)))
        inside = tuple(params for params in self.starting if _lies_in(params, parameters))
        return replace(self, parameters=tuple(parameters), starting=inside)

    def starting_configs(self) -> list[KernelConfig]:
        """`starting` as configs."""
        return [self.make_config(params) for params in self.starting]


def _lies_in(params: dict[str, Value], parameters: Iterable[Parameter]) -> bool:
    """Whether every parameter has one of its values."""
    return all(params.get(p.name) in p.values for p in parameters)


def spelling(value: Value) -> str:
    """A value as it is written on the command line: `64`, `true`, `lazy_5`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def spelled(params: Mapping[str, Value]) -> str:
    """Parameters on one line: `BLOCK_M=64 OVERLAP=true`."""
    return " ".join(f"{name}={spelling(value)}" for name, value in params.items())


def parse_choices(words: list[str]) -> dict[str, tuple[str, ...]]:
    """`NAME=V1,V2` words as {name: values, still as text}.

    Raises `ConfigError` on another form, and on a name given twice."""
    choices: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        chosen = tuple(value.strip() for value in values.split(","))
        if not (name.strip() and equals and all(chosen)):
            raise ConfigError(f"A parameter is set by NAME=VALUE or NAME=VALUE,VALUE, not {word!r}.")
        if name.strip() in choices:
            raise ConfigError(f"{name.strip()} is set twice; give all its values at once, separated by commas.")
        choices[name.strip()] = chosen
    return choices


def _require_known(starting: object, known: dict[str, set[Value]], defaults: dict[str, Value]) -> None:
    """Raises `TypeError` where a starting config has other parameters than these, or a value that none of the
    architectures has. It may leave out what has a default."""
    for row in starting if isinstance(starting, list) else [starting]:
        if (
            not isinstance(row, dict)
            or (defaults | row).keys() != known.keys()
            or any(row[name] not in known[name] for name in row)
        ):
            raise TypeError(f"the starting config {str(row)[:60]!r} does not have a known value of each parameter")


def read_space(
    family: str, parameters: tuple[Parameter, ...], everywhere: tuple[Parameter, ...], folder: Path = SEARCH_SPACES
) -> SearchSpace:
    """The space of one architecture, with the starting configs of `<family>.yaml` whose values are among its
    `parameters`; `everywhere` has those of all architectures.

    Raises `ConfigError` if the file is missing or not of this form."""
    import yaml  # here, so that a kernel that was found runs where PyYAML is not installed

    from evoattn.model import safe_yaml

    path = folder / f"{family}.yaml"
    defaults = {p.name: p.default for p in parameters if p.default is not None}
    try:
        starting = safe_yaml.load_file(path)["starting_configs"]
        _require_known(starting, {p.name: set(p.values) for p in everywhere}, defaults)
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"The search space {path} cannot be read: {error}.") from None
    return SearchSpace(
        family, parameters, tuple(defaults | row for row in starting if _lies_in(defaults | row, parameters))
    )
