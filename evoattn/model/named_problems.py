"""Problems that have a name (`search_spaces/problems.yaml`)."""

from functools import cache

from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.shape_text import complete, named_shapes, parse_shape
from evoattn.model.suggest import meant


@cache
def named_problems() -> dict[str, AttentionProblem]:
    """All of them, in the file's order. Raises `ProblemError` if the file is broken."""
    try:
        return {name: complete(fields, name) for name, fields in named_shapes().items()}
    except TypeError as error:  # a field that no problem has
        raise ProblemError(f"A problem of search_spaces/problems.yaml cannot be: {error}.") from None


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

    Raises `ProblemError` as `lookup` and `parse_shape` do."""
    return parse_shape(text) if "=" in text else lookup(text)
