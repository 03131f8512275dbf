"""Edits of kernel sources by anchors: texts that are found however a formatter sets white space and breaks lines."""

import re
from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate


class AnchorError(ValueError):
    """The source has no place, or several, where one was expected."""


class _Squeezed:
    """A text without white space and without the `//` of a comment that goes on from the line before."""

    def __init__(self, text: str) -> None:
        self._lines: list[tuple[int, int]] = []
        """Of each line: where its first character that is kept may be, and its end."""
        squeezed: list[str] = []
        in_comment, position = False, 0
        for line in text.splitlines(keepends=True):
            start = re.match(r"\s*//", line) if in_comment else None
            first = start.end() if start else 0
            squeezed.append("".join(line[first:].split()))
            self._lines.append((position + first, position + len(line)))
            in_comment = "//" in line
            position += len(line)
        self._source, self.text = text, "".join(squeezed)
        self._starts = list(accumulate(map(len, squeezed), initial=0))[:-1]

    def place(self, at: int) -> int:
        """Where the character `at` of the squeezed text was."""
        line = bisect_right(self._starts, at) - 1
        kept = [i for i in range(*self._lines[line]) if not self._source[i].isspace()]
        return kept[at - self._starts[line]]


_squeezed = lru_cache(64)(_Squeezed)  # tables of faults edit one source many times


def find_all(source: str, anchor: str) -> list[tuple[int, int]]:
    """Where the anchor stands: (first, end) of each place."""
    wanted, squeezed = _squeezed(anchor).text, _squeezed(source)
    if not wanted:
        raise AnchorError("an anchor is empty")
    starts = [match.start() for match in re.finditer(f"(?={re.escape(wanted)})", squeezed.text)]
    return [(squeezed.place(at), squeezed.place(at + len(wanted) - 1) + 1) for at in starts]


def replaced(source: str, old: str, new: str, times: int | None = 1) -> str:
    """The source with `new` for `old`. Raises `AnchorError` unless `old` has `times` places (None: any but 0)."""
    places = find_all(source, old)
    if not places or (times is not None and len(places) != times):
        raise AnchorError(f"the source has {len(places)} places like {old!r}, not {times or 'any'}")
    for first, end in reversed(places):
        source = source[:first] + new + source[end:]
    return source
