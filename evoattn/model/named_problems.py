"""Problems that have a name (`search_spaces/problems.yaml`)."""

from __future__ import annotations

from functools import cache

from evoattn.model.paths import SEARCH_SPACES
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.shape_text import complete, parse_shape
from evoattn.model.suggest import meant

_FILE = SEARCH_SPACES / "problems.yaml"


@cache
def named_problems() -> dict[str, AttentionProblem]:
    """All problems of `problems.yaml`, in its order. Raises `ProblemError` if the file is broken."""
    import yaml  # here, as by_name_or_shape of a shape needs no PyYAML

    from evoattn.model import safe_yaml

    try:
        rows = safe_yaml.load_file(_FILE)
        return {name: complete(fields, name) for name, fields in rows.items()}
    except (OSError, yaml.YAMLError, TypeError, AttributeError) as error:
        raise ProblemError(f"{_FILE} cannot be read: {' '.join(str(error).split())}.") from None


def lookup(name: str) -> AttentionProblem:
    """The problem called `name`. Raises `ProblemError` on an unknown one."""
    problems = named_problems()
    if name not in problems:
        if "=" in name:
            raise ProblemError(f"{name!r} is a shape, not the name of a problem: --shape takes it.")
        raise ProblemError(f"Unknown problem {name!r}; `evoattn problems` lists all.{meant(name, problems)}")
    return problems[name]


def by_name_or_shape(text: str) -> AttentionProblem:
    """The named problem, or that of a shape, which has an equals sign.

    Raises `ProblemError` as `lookup` and `parse_shape` do.
    """
    return parse_shape(text) if "=" in text else lookup(text)
