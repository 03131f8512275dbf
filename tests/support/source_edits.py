"""Edits of kernel sources by anchors: texts that are found however a formatter sets white space and breaks lines."""

import re
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
