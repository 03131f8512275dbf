"""What a study found, in three formats that print one and the same summary.

The names below are imported when they are first used: the page alone needs jinja2."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evoattn.report.data import render_json
    from evoattn.report.page import render_html
    from evoattn.report.summary import summarise
    from evoattn.report.table import render_table

__all__ = ["render_html", "render_json", "render_table", "summarise"]

_HOMES = {"render_html": "page", "render_json": "data", "render_table": "table", "summarise": "summary"}
"""Public name → the module of this package that defines it."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
