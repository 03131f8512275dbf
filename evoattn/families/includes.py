"""`#include "…"` lines of templates and device headers, resolved once, so that a source is whole."""

import os
import re
from functools import cache
from pathlib import Path

_INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]*"([^"\n]*)"[ \t]*(?://.*)?')
"""A line that includes a header of ours; `#include <…>` is the compiler's."""


class IncludeError(ValueError):
    """A header that cannot be included, in one sentence: a fault of a template or header, not of a config."""


def resolve(source: str, folder: Path) -> str:
    """The text of `source` with each `#include "name"` line replaced by the header `folder / name`.

    A header comes verbatim and once, at its first include, after the headers that it includes itself. Raises
    `IncludeError` on a header that is missing, that includes itself by whatever way, or whose includes do not stand
    before its code."""
    done: set[str] = set()
    lines: list[str] = []
    for line in source.splitlines(keepends=True):
        if "#" in line and (match := _INCLUDE.fullmatch(line.rstrip("\n"))):
            lines += [f"{text}\n\n" for name, text in _with_its_own(match[1], folder) if name not in done]
            done |= {name for name, _ in _with_its_own(match[1], folder)}
        else:
            lines.append(line)
    return "".join(lines)


@cache
def _with_its_own(name: str, folder: Path) -> tuple[tuple[str, str], ...]:
    """(name, text) of the header and of all that it includes, those first. Read once: a search renders thousands of
    sources with the same headers."""
    return tuple(_headers(name, folder, set(), ()))


def _headers(name: str, folder: Path, done: set[str], within: tuple[str, ...]) -> list[tuple[str, str]]:
    """(name, text) of the header and of all that it includes and that is not yet `done`, those first."""
    if name in within:
        raise IncludeError(f"The header {name} includes itself: {' → '.join((*within, name))}.")
    if name in done:
        return []
    by = f" by {within[-1]}" if within else ""
    path = folder / name
    if os.path.normpath(name).startswith(("..", "/")) or not path.is_file():
        raise IncludeError(f"There is no header {name!r} in {folder.name}; it is included{by or ' by a template'}.")
    done.add(name)
    texts: list[tuple[str, str]] = []
    own: list[str] = []
    has_code = False
    for line in path.read_text(encoding="utf-8").splitlines():
        if "#" in line and (match := _INCLUDE.fullmatch(line)):
            if has_code:
                raise IncludeError(f"The header {name} includes {match[1]} after its code began.")
            texts += _headers(match[1], folder, done, (*within, name))
        else:
            own.append(line)
            has_code = has_code or (bool(line.strip()) and not line.lstrip().startswith("//"))
    return [*texts, (name, "\n".join(own).strip("\n"))]
