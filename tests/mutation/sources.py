"""A family's CUDA as files, each of which can be changed and rendered again."""

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Protocol, TypeVar

from evoattn.families.render import MARKER
from evoattn.model.paths import TEMPLATES
from tests.mutation.changes import Change, changes_of

_INCLUDE = re.compile(r'[ \t]*#[ \t]*include[ \t]*"([^"\n]*)"[ \t]*(?://.*)?')


@dataclass(frozen=True)
class Mutant:
    """A change of one file under `templates/`."""

    file: str
    change: Change

    @property
    def kind(self) -> str:
        return self.change.kind

    @property
    def key(self) -> str:
        """The same as long as the file says the same there. Like lines of a file are told apart by their number, like
        changes of a line by their column."""
        change = self.change
        lines = bare_lines(self.file)
        line = lines[change.line - 1]
        number = lines[: change.line].count(line)
        again = f" (again {number})" if number > 1 else ""
        column = change.first - text_of(self.file).rfind("\n", 0, change.first) - 1
        return f"{self.file} | {line}{again} | {change.kind} | {change.what} | {column}"

    def __str__(self) -> str:
        return f"{self.file}:{self.change.line}: {self.change.kind}: {self.change.what}"

    def applied(self, source: str) -> str | None:
        """A rendered source with the change; None if the source lacks the place, or has it more than once."""
        span = self.place(source)
        if span is None:
            return None
        text, change = text_of(self.file), self.change
        first_of_line = text.rfind("\n", 0, change.first) + 1
        start = span[0] + change.first - first_of_line
        return source[:start] + change.new + source[start + change.end - change.first :]

    def place(self, source: str) -> tuple[int, int] | None:
        """Where the changed lines stand in a rendered source."""
        text, change = text_of(self.file), self.change
        first = text.rfind("\n", 0, change.first) + 1
        end = text.find("\n", change.end - 1)
        end = len(text) if end < 0 else end
        low, high = first, end
        for _ in range(12):
            at = source.find(text[low:high])
            if at < 0:
                return None
            if source.find(text[low:high], at + 1) < 0:
                return at + first - low, at + end - low
            low, high = _before(text, low), _after(text, high)
        return None


class Drawn(Protocol):
    """What `in_turn` orders."""

    @property
    def key(self) -> str: ...
    @property
    def kind(self) -> str: ...


M = TypeVar("M", bound=Drawn)


def in_turn(every: Iterable[M], seed: str) -> list[M]:
    """The mutants shuffled, the kinds of change in turn."""
    mutants = sorted(every, key=lambda mutant: mutant.key)
    random.Random(seed).shuffle(mutants)
    kinds: dict[str, list[M]] = {}
    for mutant in mutants:
        kinds.setdefault(mutant.kind, []).append(mutant)
    return [mutant for turn in zip_longest(*kinds.values()) for mutant in turn if mutant]


def _before(text: str, at: int) -> int:
    """The start of the line before, but of an include, which is not there once rendered."""
    start = text.rfind("\n", 0, max(at - 1, 0)) + 1
    return at if _INCLUDE.fullmatch(text[start : max(at - 1, 0)]) else start


def _after(text: str, at: int) -> int:
    end = text.find("\n", at + 1)
    end = len(text) if end < 0 else end
    return at if _INCLUDE.fullmatch(text[at + 1 : end]) else end


@cache
def text_of(file: str) -> str:
    return (TEMPLATES / file).read_text()


@cache
def bare_lines(file: str) -> list[str]:
    """Lines without comments and indentation."""
    return [line.split("//")[0].strip() for line in text_of(file).splitlines()]


@cache
def files_of(family: str) -> tuple[str, ...]:
    """The family's template and all headers that it may include, whatever the config."""
    found: dict[str, None] = {}

    def visit(name: str) -> None:
        if name in found:
            return
        found[name] = None
        for line in text_of(name).splitlines():
            if match := _INCLUDE.fullmatch(line):
                if "{{" in match[1]:
                    pattern = re.sub(r"\{\{.*?\}\}", "*", match[1])
                    for path in sorted(TEMPLATES.glob(pattern)):
                        visit(str(Path(path).relative_to(TEMPLATES)))
                else:
                    visit(match[1])

    visit(f"{family}.cu.j2")
    return tuple(found)


def changes_in(file: str) -> list[Change]:
    """What can be changed of a file's CUDA."""
    text = text_of(file)
    return changes_of(text, text[: text.index(MARKER)].count("\n") + 2 if MARKER in text else 1)


@cache
def mutants_in(file: str) -> dict[str, Mutant]:
    """All mutants of a file, by their keys."""
    return {mutant.key: mutant for mutant in (Mutant(file, change) for change in changes_in(file))}


@cache
def mutants_of(family: str) -> tuple[Mutant, ...]:
    """All mutants of the family's files."""
    return tuple(mutant for file in files_of(family) for mutant in mutants_in(file).values())
