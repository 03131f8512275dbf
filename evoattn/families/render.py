"""(problem, config) → Candidate: the only importer of jinja2."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from evoattn.families.base import Family
from evoattn.families.includes import resolve
from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate
from evoattn.model.space import KernelConfig

MARKER = "// ---- plain CUDA below: no Jinja ----"
"""The line in every template under which nothing is rendered."""


LINE = 120
"""Columns."""
Renderer = Callable[[Family, AttentionProblem, KernelConfig, GpuSpec], Candidate]
"""What `render` is."""


def _cpp_literal(value: Any) -> Any:
    """Booleans as C++ spells them; everything else as it is."""
    return str(value).lower() if isinstance(value, bool) else value


@cache
def _environment(templates: Path) -> Environment:
    return Environment(
        loader=FileSystemLoader(templates),
        undefined=StrictUndefined,
        finalize=_cpp_literal,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        auto_reload=False,  # else each rendering asks the disk when each of its files was changed
    )


def _declared(family: Family, names: list[str], constants: dict[str, Any]) -> str:
    """`{{ genes("NAME …") }}`: constants of these genes, each with the meaning that its declaration says. A word is a
    value of an `enum class`: `shared` of Q_PLACE is `QPlace::SHARED`."""
    lines = []
    for name in names:
        value, meaning = constants[name], family.genes.declared[name].meaning
        if isinstance(value, str):
            kind = name.title().replace("_", "")
            value = f"{kind}::{value.upper()}"
        else:
            kind = "bool" if isinstance(value, bool) else "int"
        line = f"constexpr {kind} {name} = {_cpp_literal(value)};"
        beside = f"{line}  // {meaning}"
        lines += [beside] if len(beside) <= LINE else [*(f"// {part}" for part in wrap(meaning, LINE - 3)), line]
    return "\n".join(lines)


def render(family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> Candidate:
    """Fill the family's template with its constants and put the headers that it includes in their places.

    Headers are put in after Jinja has run, which would rewrite `{{0}}` in C++. Raises `jinja2.TemplateError` if
    template and `constants` disagree and `IncludeError` if a header cannot be included: both are faults of the family,
    not of a config."""
    constants = family.all_constants(problem, config, gpu)
    template = _environment(family.templates).get_template(f"{family.name}.cu.j2")
    text = template.render(constants, genes=lambda names: _declared(family, names.split(), constants))
    return Candidate(family.name, config.params, config.id, resolve(text, TEMPLATES), gpu.arch)
