"""Writes docs/cli.md from the commands themselves: `python -m scripts.cli_reference`. A test holds it against them.

The commands by which evoattn's own list of kernels and cost model are made go to scripts/commands.md."""

import argparse
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from evoattn.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
HEAD = """# Command line reference

Written by `python -m scripts.cli_reference` from the commands themselves; a test fails where they differ.
[Contributors' commands](../scripts/commands.md) have a page of their own.

Every error is one sentence on stderr that says what to do next. Exit code 2: a word was wrong. Exit code 1: a run
failed.

A shape is written `B=1,H=16,S=1024,D=64,dtype=fp16,mask=full`. `evoattn search` has all keys. The usual spellings are
understood, in any case: `dtype=float16`, `half`, `bfloat16` or `float32`, and `mask=causal`, which is
`causal_upper_left`, as `is_causal=True` is in PyTorch.

A budget is a time (`90s`, `30m`, `2h`) or a count (`500trials`). A trial is named by its number, which is unique in the
database, or by `best`.

`EVOATTN_DB` is what `--db` is without that option; `EVOATTN_CACHE` is the folder of compiled kernels,
of which those that were used longest ago are removed over `EVOATTN_CACHE_GB` gigabytes (4 unless set).
"""
MAKERS = """# Commands for contributors

Written by `python -m scripts.cli_reference`. They make the list of kernels and the cost model that come with evoattn.
[The others](../docs/cli.md) are for users.
"""
PAGES = {ROOT / "docs/cli.md": HEAD, ROOT / "scripts/commands.md": MAKERS}
"""Each page and what it begins with."""
GROUPS = "portfolio ", "cost "
"""What contributors' commands begin with."""
COMMON = 2
"""An option or argument that as many commands have in the same words stands once on the page."""


def page(path: Path) -> str:
    """One of `PAGES` as Markdown."""
    root: Any = typer.main.get_command(app)
    makers = PAGES[path] == MAKERS
    commands = {name: one for name, one in _commands(root) if name.startswith(GROUPS) == makers}
    counts = Counter(line for command in commands.values() for line in _words(command).values())
    often = [line for line, count in counts.most_common() if count >= COMMON]
    usual = {line.partition(":")[0]: line for line in reversed(often)}  # of a name the line that most commands have
    common = [line for line in counts if line in usual.values()]
    parts = [PAGES[path], *([] if makers else _words(root).values())]
    parts += ['\nOptions and arguments of several commands, which name them as "also":\n', *common]
    for name, command in commands.items():
        arguments = [_metavar(p) for p in command.params if p.param_type_name == "argument" and not p.hidden]
        paragraphs = [" ".join(part.split()) for part in (command.help or "").split("\n\n")]
        words = _words(command)
        also = [name for name, line in words.items() if line in common]
        parts += [f"\n## evoattn {name}\n", *([f"`{' '.join(['evoattn', name, *arguments])}`\n"] if arguments else [])]
        parts += [*(_wrapped(part) + "\n" for part in paragraphs), *(x for x in words.values() if x not in common)]
        parts += [_wrapped(f"- also {', '.join(also)}")] if also else []
    return "\n".join(parts).rstrip() + "\n"


def _commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Each command with its name, those of a group as `GROUP NAME`."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield before + name, command


def _words(command: Any) -> dict[str, str]:
    """A line for each argument and option: its names, its meaning and what it is where it is left out."""
    lines = {}
    for p in command.params:
        if p.hidden:
            continue
        option = p.param_type_name == "option"
        names = [*p.opts, *p.secondary_opts] if option else [_metavar(p)]
        value = f" {p.metavar}" if option and p.metavar else ""
        given = p.show_default if isinstance(p.show_default, str) else p.default
        default = f" (default: {given})" if given not in (None, False, True, "", ...) and not p.required else ""
        name = f"`{', '.join(names)}{value}`"
        lines[name] = _wrapped(f"- {name}: {p.help}{default}")
    return lines


def _metavar(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for place in PAGES:
        place.write_text(page(place))
        print(f"Wrote {place}.")
