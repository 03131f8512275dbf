"""Edits of kernel sources by anchors: texts that are found however a formatter sets white space and breaks lines."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache


class AnchorError(ValueError):
    """The source has no place, or several, where one was expected."""


@lru_cache(64)  # tables of faults edit one source many times
def _squeezed(text: str) -> tuple[str, tuple[int, ...]]:
    """The text without white space and without the `//` of a comment that goes on from the line before; where each of
    its characters was."""
    kept: list[int] = []
    in_comment = False
    position = 0
    for line in text.splitlines(keepends=True):
        start = re.match(r"\s*(?://)?", line)
        goes_on = in_comment and start is not None and start[0].endswith("//")
        first = start.end() if goes_on and start is not None else 0
        kept += [position + i for i in range(first, len(line)) if not line[i].isspace()]
        in_comment = "//" in line
        position += len(line)
    return "".join(text[i] for i in kept), tuple(kept)


def find_all(source: str, anchor: str) -> list[tuple[int, int]]:
    """Where the anchor stands: (first, end) of each place."""
    wanted, (text, positions) = _squeezed(anchor)[0], _squeezed(source)
    if not wanted:
        raise AnchorError("an anchor is empty")
    starts = [match.start() for match in re.finditer(f"(?={re.escape(wanted)})", text)]
    return [(positions[at], positions[at + len(wanted) - 1] + 1) for at in starts]


def replaced(source: str, old: str, new: str, times: int | None = 1) -> str:
    """The source with `new` for `old`. Raises `AnchorError` unless `old` has `times` places (None: any but 0)."""
    places = find_all(source, old)
    if not places or (times is not None and len(places) != times):
        raise AnchorError(f"the source has {len(places)} places like {old!r}, not {times or 'any'}")
    for first, end in reversed(places):
        source = source[:first] + new + source[end:]
    return source


def statements(source: str) -> list[tuple[int, int]]:
    """(first, end) of each statement or line with the comment behind it, however many lines it takes."""
    spans: list[tuple[int, int]] = []
    position, open_from, comment_column = 0, None, -1
    for line in source.splitlines(keepends=True):
        code, slashes, _ = line.partition("//")
        starts_comment = bool(slashes) and not code.strip()
        if open_from is not None:  # the code before has not ended
            first = open_from
        elif starts_comment and len(code) == comment_column and spans:  # the comment before goes on
            first = spans.pop()[0]
        else:
            first = position
        position += len(line)
        ended = not code.strip() or code.lstrip().startswith("#") or code.rstrip()[-1] in ";{}:"
        if starts_comment and open_from is None:
            ended = True
        open_from = None if ended else first
        if ended:
            spans.append((first, position))
        if slashes and code.strip():
            comment_column = len(code)
        elif not starts_comment:
            comment_column = -1
    if open_from is not None:
        spans.append((open_from, position))
    return spans


def line_edit(line: str, old: str, new: str) -> Callable[[str], str]:
    """An edit of a source: `new` for `old` in the statement that holds both `line` and `old`; `line` is its end if
    it ends in a line break. A source with none or several such statements raises `AnchorError`: the fault would not be
    the one that it names."""

    def edit(source: str) -> str:
        wanted, at_end = _squeezed(line)[0], line.endswith("\n")
        hits = []
        for first, end in statements(source):
            text = _squeezed(source[first:end])[0]
            holds = text.endswith(wanted) if at_end else wanted in text
            if holds and find_all(source[first:end], old):
                hits.append((first, end))
        if len(hits) != 1:
            raise AnchorError(f"{len(hits)} statements have {line!r} and {old!r}")
        first, end = hits[0]
        return source[:first] + replaced(source[first:end], old, new, None) + source[end:]

    return edit
