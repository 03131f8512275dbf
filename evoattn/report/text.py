"""Text for a terminal: clean, broken between words only, and commands that can be pasted."""

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDEST = 100
"""Columns up to which sentences and commands use the terminal's width."""


def clean(value: Any) -> str:
    """Text from the database without anything that a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in str(value))


def make_table() -> Table:
    """An empty table of the report."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def print_table(console: Console, title: str, table: Table) -> None:
    """The table under its title, which is as wide as the console, not as the table."""
    print_text(console, title, "bold")
    console.print(table)


def add_row(table: Table, *values: object) -> None:
    """A row of plain text: nothing in it is markup."""
    table.add_row(*(Text(clean(value)) for value in values))


def number(value: float | None, digits: int) -> str:
    """A number with so many decimals; `-` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def print_lines(console: Console, lines: Iterable[str], style: str = "") -> None:
    """Lines as they are: whoever made them kept to the width, and what is to be pasted stays whole."""
    for line in lines:
        console.print(Text(line, style), soft_wrap=True)


def print_text(console: Console, text: str, style: str = "", indent: str = "") -> None:
    """A sentence or more, wrapped between words; further lines begin with two spaces more than `indent`."""
    print_lines(console, wrapped(clean(text), min(console.width, WIDEST), indent), style)


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of at most `width` columns, but for a word that is longer, which is never broken."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def command(groups: Sequence[Sequence[str]], width: int, indent: str = "  ", any_order: bool = False) -> list[str]:
    """The lines of one shell command, continued by backslashes. The words of a group, such as an option and its value,
    stay on one line; in `any_order` a group goes to the first line that has room for it."""
    lines: list[str] = []
    for part in (shlex.join(map(clean, group)) for group in groups):
        roomy = [i for i, line in enumerate(lines) if len(line) + len(part) + 3 <= width]
        place = next((i for i in roomy if any_order or i == len(lines) - 1), None)
        if place is None:
            lines.append(f"{indent}  {part}" if lines else indent + part)
        else:
            lines[place] += f" {part}"
    return [*(f"{line} \\" for line in lines[:-1]), *lines[-1:]]


def cost_text(value: float | None) -> str:
    """A relative cost for people."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
