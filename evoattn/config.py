"""Search spaces read from YAML, and one choice of their parameters."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from evoattn import safe_yaml
from evoattn.gpu import GpuSpec
from evoattn.paths import SEARCH_SPACES
from evoattn.problem import AttentionProblem

Value = int | float | str | bool


class ConfigError(ValueError):
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
    """Rows `{when: {field: [values]}, config: {…}}` as in the YAML."""

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
        """The config with exactly this space's parameters, in its order. Raises `ConfigError` on a missing, surplus or foreign value."""
        missing = [p.name for p in self.parameters if p.name not in params]
        surplus = sorted(set(params) - set(self.names()))
        if missing or surplus:
            raise ConfigError(f"{self.family} needs exactly the parameters {', '.join(self.names())}; missing {missing}, surplus {surplus}.")
        for p in self.parameters:
            if params[p.name] not in p.values:
                raise ConfigError(f"{self.family}: {p.name}={params[p.name]!r} is not one of {list(p.values)}.")
        return KernelConfig(self.family, {p.name: params[p.name] for p in self.parameters})

    def starting_configs(self, problem: AttentionProblem) -> list[KernelConfig]:
        """The starting configs whose `when` fits the problem, in the YAML's order."""
        fields = problem.to_dict() | {"causal": problem.causal}
        rows = [row for row in self.starting if all(fields[key] in allowed for key, allowed in row.get("when", {}).items())]
        return [self.make_config(row["config"]) for row in rows]


def _require_plain(parameters: tuple[Parameter, ...], starting: tuple[dict[str, Any], ...]) -> None:
    """Raises `TypeError` on a value that is no number, word or truth value, a name that is no identifier, or a row that is no `{when, config}`."""
    for p in parameters:
        if not (isinstance(p.name, str) and p.name.isidentifier() and p.values and all(isinstance(v, (int, float, str)) for v in p.values)):
            raise TypeError(f"the parameter {str(p.name)[:40]!r} and its values are not a name and a list of numbers or words")
    for row in starting:
        if not isinstance(row, dict) or not isinstance(row.get("config"), dict) or not isinstance(row.get("when", {}), dict):
            raise TypeError(f"the starting config {str(row)[:60]!r} is not of the form {{when: {{…}}, config: {{…}}}}")


def load_space(family: str, gpu: GpuSpec, folder: Path = SEARCH_SPACES) -> SearchSpace:
    """Read `search_spaces/<family>.yaml` for one GPU; values under `architectures: <arch>` replace the general ones.

    Raises `ConfigError` if the file is missing or not of this form.
    """
    path = folder / f"{family}.yaml"
    try:
        text = safe_yaml.load_file(path)
        overrides = (text.get("architectures") or {}).get(gpu.arch, {})
        parameters = tuple(
            Parameter(name, tuple(overrides.get(name, row["values"])), row["meaning"]) for name, row in text["parameters"].items()
        )
        starting = tuple(text.get("starting_configs") or ())
        _require_plain(parameters, starting)
    except (OSError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"The search space {path} cannot be read: {error}.") from None
    return SearchSpace(family, parameters, starting)
