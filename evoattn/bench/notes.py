"""What the bench says beside a problem's row: one line a sentence, however many kernels it is about."""

from __future__ import annotations

from typing import NamedTuple

MAX_COLUMNS = 160
"""Of a printed line; the JSON holds the whole note."""


class Note(NamedTuple):
    """`subject`: the trial, file or problem that the sentence is about."""

    subject: str
    sentence: str


def grouped(notes: list[Note]) -> list[str]:
    """A line a sentence, in the order of first mention: its first subject, how many more there are, and the
    sentence."""
    subjects: dict[str, list[str]] = {}
    for subject, sentence in notes:
        subjects.setdefault(" ".join(sentence.split()), []).append(subject)
    return [
        f"{named[0]}{f' and {len(named) - 1} more' if len(named) > 1 else ''}: {sentence}"
        for sentence, named in subjects.items()
    ]


def shortened(line: str) -> str:
    """The line, cut to `MAX_COLUMNS` columns."""
    return line if len(line) <= MAX_COLUMNS else line[: MAX_COLUMNS - 1] + "…"
