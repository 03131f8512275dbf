"""Faults put into the rendered source of a kernel."""

from __future__ import annotations

from collections.abc import Callable


def line_edit(line: str, old: str, new: str) -> Callable[[str], str]:
    """An edit of a source: `new` for `old` in the line that holds both `line` and `old`. A source with none or several such lines fails the
    test: the fault would not be the one that it names."""

    def edit(source: str) -> str:
        lines = source.splitlines(keepends=True)
        hits = [i for i, text in enumerate(lines) if line in text and old in text]
        assert len(hits) == 1, f"{len(hits)} lines have {line!r} and {old!r}"
        lines[hits[0]] = lines[hits[0]].replace(old, new)
        return "".join(lines)

    return edit
