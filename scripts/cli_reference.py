"""Writes docs/cli.md from the commands themselves: `python -m scripts.cli_reference`. A test holds it against them."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from evoattn.cli.main import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
HEAD = """# Command line reference

Written by `python -m scripts.cli_reference` from the commands themselves; a test fails where they differ.

Every error is one sentence on stderr that says what to do next. Exit code 2: a word was wrong. Exit code 1: a run
failed. `evoattn --install-completion` lets the shell complete commands and options.

A shape is written `B=1,H=16,S=1024,D=64,dtype=fp16,mask=full`. Keys: `B` batch, `H` heads, `Hkv` K/V heads, `S` length
(or `Sq` and `Sk`), `D` head dimension, `dtype`, `mask`, `layout` and `lse`. The usual spellings are understood, in any
case: `dtype=float16`, `half`, `bfloat16` or `float32`, and `mask=causal`, which is `causal_upper_left`, as
`is_causal=True` is in PyTorch. [Variants](variants.md) such as windows have keys of their own.

A budget is a time (`90s`, `30m`, `2h`) or a count (`500trials`). A trial is named by its number, which is unique in the
database, or by `best`.

`EVOATTN_DB` is what `--db` is without that option; `EVOATTN_CACHE` is the folder of compiled kernels,
of which those that were used longest ago are removed over `EVOATTN_CACHE_GB` gigabytes (4 unless set).
"""


def page() -> str:
    """The whole reference as Markdown."""
    root: Any = typer.main.get_command(app)
    parts = [HEAD, *_words(root)]
    for name, command in _commands(root):
        arguments = [_metavar(p) for p in command.params if p.param_type_name == "argument" and not p.hidden]
        usage = " ".join(["evoattn", name, *arguments, "[OPTIONS]"])
        paragraphs = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
        parts += [f"\n## evoattn {name}\n", f"```\n{usage}\n```\n"]
        parts += [*(_wrapped(part) + "\n" for part in paragraphs), *_words(command)]
    return "\n".join(parts).rstrip() + "\n"


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Each command with its name, those of a group as `GROUP NAME`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def _words(command: Any) -> list[str]:
    """A line for each argument and option: its names, its meaning and what it is where it is left out."""
    lines = []
    for p in command.params:
        if p.hidden:
            continue
        option = p.param_type_name == "option"
        names = [*p.opts, *p.secondary_opts] if option else [_metavar(p)]
        value = f" {p.metavar}" if option and p.metavar else ""
        given = p.show_default if isinstance(p.show_default, str) else p.default
        default = f" (default: {given})" if given not in (None, False, True, ...) and not p.required else ""
        lines.append(_wrapped(f"- `{', '.join(names)}{value}`: {p.help}{default}"))
    return lines


def _metavar(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())
    print(f"Wrote {PAGE}.")
