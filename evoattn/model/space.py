"""Search spaces read from YAML, and one choice of their parameters."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from evoattn.model.errors import WrongUse
from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import SEARCH_SPACES
from evoattn.model.problem import AttentionProblem

Value = int | float | str | bool
ARCH = "arch"
"""The one `when` of a starting config that is about the GPU, not the problem."""


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

    @property
    def id(self) -> str:
        return config_id(self.family, self.params)

    def describe(self) -> str:
        """Short text for tables: `BLOCK_M=64 BLOCK_N=64 …`, in the space's order."""
        return " ".join(f"{k}={int(v) if isinstance(v, bool) else v}" for k, v in self.params.items())


@dataclass(frozen=True)
class Parameter:
    """One dimension of a search space: its values in ascending or natural order, and what it means."""

    name: str
    values: tuple[Value, ...]
    meaning: str


@dataclass(frozen=True)
class SearchSpace:
    """The parameters of one family on one architecture, and its known-good starting configs for a problem."""

    family: str
    parameters: tuple[Parameter, ...]
    starting: tuple[dict[str, Any], ...]
    """Rows `{when: {field: [values]}, config: {…}}` as in the YAML; those for other architectures are left out."""

    @property
    def size(self) -> int:
        """Number of points, valid or not."""
        product = 1
        for p in self.parameters:
            product *= len(p.values)
        return product

    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters)

    def make_config(self, params: dict[str, Value]) -> KernelConfig:
        """The config with exactly this space's parameters, in its order.

        Raises `ConfigError` on a missing, surplus or foreign value.
        """
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

        Raises `ConfigError` on a value that the parameter does not have.
        """
        parameters = []
        for p in self.parameters:
            spelled = {spelling(value): value for value in p.values}
            chosen = choices.get(p.name, tuple(spelled))
            if foreign := [text for text in chosen if text not in spelled]:
                raise ConfigError(f"{self.family}: {p.name}={foreign[0]} is not one of {', '.join(spelled)}.")
            parameters.append(replace(p, values=tuple(value for text, value in spelled.items() if text in chosen)))
        allowed = {p.name: p.values for p in parameters}
        starting = tuple(
            row for row in self.starting if all(row["config"].get(name) in values for name, values in allowed.items())
        )
        return replace(self, parameters=tuple(parameters), starting=starting)

    def starting_configs(self, problem: AttentionProblem) -> list[KernelConfig]:
        """The starting configs whose `when` fits the problem, in the YAML's order."""
        fields = problem.to_dict() | {"causal": problem.causal}
        when = [
            (row, {key: values for key, values in row.get("when", {}).items() if key != ARCH}) for row in self.starting
        ]
        rows = [row for row, conditions in when if all(fields[key] in allowed for key, allowed in conditions.items())]
        return [self.make_config(row["config"]) for row in rows]


def spelling(value: Value) -> str:
    """A value as it is written on the command line: `64`, `true`, `lazy_5`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_choices(words: list[str]) -> dict[str, tuple[str, ...]]:
    """`NAME=V1,V2` words as {name: values, still as text}.

    Raises `ConfigError` on another form, and on a name given twice.
    """
    choices: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        chosen = tuple(value.strip() for value in values.split(","))
        if not (name.strip() and equals and all(chosen)):
            raise ConfigError(f"--set takes NAME=VALUE or NAME=VALUE,VALUE, not {word!r}.")
        if name.strip() in choices:
            raise ConfigError(f"--set names {name.strip()} twice; give all its values at once, separated by commas.")
        choices[name.strip()] = chosen
    return choices


def _require_plain(parameters: tuple[Parameter, ...], starting: tuple[dict[str, Any], ...]) -> None:
    """Raises `TypeError` on a value that is no number, word or truth value, a name that is no identifier, or a row that
    is no `{when, config}`."""
    for p in parameters:
        if not (
            isinstance(p.name, str)
            and p.name.isidentifier()
            and p.values
            and all(isinstance(v, (int, float, str)) for v in p.values)
        ):
            raise TypeError(
                f"the parameter {str(p.name)[:40]!r} and its values are not a name and a list of numbers or words"
            )
    for row in starting:
        if (
            not isinstance(row, dict)
            or not isinstance(row.get("config"), dict)
            or not isinstance(row.get("when", {}), dict)
        ):
            raise TypeError(f"the starting config {str(row)[:60]!r} is not of the form {{when: {{…}}, config: {{…}}}}")


@cache
def load_space(family: str, gpu: GpuSpec, folder: Path = SEARCH_SPACES) -> SearchSpace:
    """Read `search_spaces/<family>.yaml` for one GPU; values under `architectures: <arch>` replace the general ones,
    and starting configs with `when: {arch: […]}` are for those only.

    Raises `ConfigError` if the file is missing or not of this form.
    """
    import yaml  # here, so that a kernel that was found runs where PyYAML is not installed

    from evoattn.model import safe_yaml

    path = folder / f"{family}.yaml"
    try:
        text = safe_yaml.load_file(path)
        overrides = (text.get("architectures") or {}).get(gpu.arch, {})
        parameters = tuple(
            Parameter(name, tuple(overrides.get(name, row["values"])), row["meaning"])
            for name, row in text["parameters"].items()
        )
        starting = tuple(text.get("starting_configs") or ())
        _require_plain(parameters, starting)
        starting = tuple(row for row in starting if gpu.arch in row.get("when", {}).get(ARCH, (gpu.arch,)))
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"The search space {path} cannot be read: {error}.") from None
    return SearchSpace(family, parameters, starting)
