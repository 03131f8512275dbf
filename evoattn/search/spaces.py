"""The search spaces of a study: of which families, and how much of each."""

from collections.abc import Sequence
from dataclasses import replace

from evoattn.families import registry
from evoattn.model.errors import meant
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.space import ConfigError, SearchSpace, parse_choices
from evoattn.search.starting import begin


def choose_spaces(
    families: Sequence[str], choices: Sequence[str], starting_configs: bool, problem: AttentionProblem, gpu: GpuSpec
) -> dict[str, SearchSpace]:
    """The spaces of the named families, or of all that can serve the problem, as `--set NAME=V1,V2` words leave them,
    with the configs that the search begins with; none of those without `starting_configs`.

    Raises `FamilyError` on an unknown family, `ProblemError` where a named family, or every one, cannot serve the
    problem, `ConfigError` on a name or a value that no searched family has."""
    spaces, reasons = {}, []
    for name in dict.fromkeys(families or registry.FAMILIES):
        family = registry.lookup(name)
        if reason := family.why_unsupported(problem, gpu):
            reasons.append(reason)
        else:
            spaces[name] = family.space(problem, gpu)
    if not spaces or (families and reasons):
        raise ProblemError(f"No kernel for this problem: {' '.join(reasons)}")
    chosen = parse_choices(list(choices))
    known = sorted({name for space in spaces.values() for name in space.names()})
    if unknown := sorted(set(chosen).difference(known)):
        raise ConfigError(
            f"No searched family has a parameter {unknown[0]}; they have {', '.join(known)}.{meant(unknown[0], known)}"
        )
    spaces = _restricted(spaces, chosen)
    if starting_configs:
        return begin(spaces, problem, gpu)
    return {name: replace(space, starting=()) for name, space in spaces.items()}


def _restricted(spaces: dict[str, SearchSpace], chosen: dict[str, tuple[str, ...]]) -> dict[str, SearchSpace]:
    """Raises `ConfigError` on a value that a family does not have; it names the families that have all of them."""
    able, wrong = {}, []
    for name, space in spaces.items():
        try:
            able[name] = space.restricted(chosen)
        except ConfigError as error:
            wrong.append(str(error))
    if not wrong:
        return able
    others = "".join(f" --family {name}" for name, space in able.items() if set(chosen) <= set(space.names()))
    raise ConfigError(wrong[0] + (f" Other families have it: say{others}." if others else ""))
