"""(problem, config) → Candidate: the only importer of jinja2."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from evoattn.families.base import Family
from evoattn.model.gpu import GpuSpec
from evoattn.model.paths import DEVICE_HEADERS, TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate
from evoattn.model.space import KernelConfig

MARKER = "// ---- plain CUDA below: no Jinja ----"
"""The line in every template under which nothing is rendered."""


def _cpp_literal(value: Any) -> Any:
    """Booleans as C++ spells them; everything else as it is."""
    return str(value).lower() if isinstance(value, bool) else value


def _device_header(name: str) -> str:
    """A shared leaf verbatim: an `{% include %}` would let Jinja rewrite `{{0}}` in C++."""
    return (DEVICE_HEADERS / name).read_text().rstrip()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        finalize=_cpp_literal,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.globals["device_header"] = _device_header
    return environment


def render(family: Family, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> Candidate:
    """Fill the family's template with its constants.

    Raises `jinja2.TemplateError` only if template and `constants` disagree, which is a bug of the family, not of a config.
    """
    source = _environment().get_template(f"{family.name}.cu.j2").render(family.constants(problem, config, gpu))
    return Candidate(family.name, config.params, config.id, source, gpu.arch)
