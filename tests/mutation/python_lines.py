"""Which tests run which statements of evoattn, so that a mutant meets those alone that can notice it."""

import ast
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Place = tuple[str, int]
"""A file relative to the sources, and the lines of a statement of it, or of its head, as bits of a number."""
WATCHED = "EVOATTN_WATCHED"
"""Of the processes that tests start: the folder of the sources, a `:`, and a file to write to."""
MOST_EVENTS = 2000
"""Lines of one function in one test that are looked at; after so many, those left count as run, which saves time."""


class Lines:
    """Keeps which lines of functions of `root`/evoattn this process runs, and the processes that it starts, which add
    theirs to the file `said`."""

    def __init__(self, root: Path, said: Path, started: bool = False) -> None:
        self._root, self._said, self._child, self._read = f"{root}/", said, started, 0
        self._ran: dict[str, int] = {}
        self._left: dict[int, tuple[CodeType, set[int], list[int]]] = {}  # its lines that did not run; events
        self._foreign: dict[int, CodeType] = {}  # kept, so that no other function gets its id
        os.register_at_fork(after_in_child=self._forked)
        threading.settrace(self._see)
        sys.settrace(self._see)

    def _forked(self) -> None:
        self._child = True

    def _see(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if id(code) in self._foreign:
            return None
        if id(code) not in self._left:
            if not code.co_filename.startswith(f"{self._root}evoattn/") or code.co_name == "<module>":
                self._foreign[id(code)] = code
                return None
            self._left[id(code)] = code, {line for _, _, line in code.co_lines() if line}, [0]
        return self._line if self._left[id(code)][1] else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        code, left, events = self._left.get(id(frame.f_code), (frame.f_code, set[int](), [0]))
        events[0] += 1
        ran = {*left} if events[0] > MOST_EVENTS else left & {frame.f_lineno}
        left -= ran
        if ran:
            self._add(code.co_filename.removeprefix(self._root), sum(1 << line for line in ran))
        if not left:
            frame.f_trace_lines = False
        return self._line

    def _add(self, file: str, lines: int) -> None:
        self._ran[file] = self._ran.get(file, 0) | lines
        if self._child:
            with self._said.open("a") as said:
                said.write(f"{file} {lines:x}\n")

    def take(self) -> dict[str, str]:
        """By file the lines that ran since this was called last, bits of a hexadecimal number."""
        text = self._said.read_text()[self._read :] if self._said.exists() else ""
        self._read += text.rfind("\n") + 1
        for file, lines in (line.split() for line in text.splitlines(True) if line.endswith("\n")):
            self._add(file, int(lines, 16))
        found = {file: f"{lines:x}" for file, lines in self._ran.items()}
        self._ran, self._left = {}, {}
        return found


def watch_this_process() -> None:
    """Of one that a test started: see `WATCHED`."""
    if WATCHED in os.environ:
        root, said = os.environ[WATCHED].split(":")
        Lines(Path(root), Path(said), started=True)


def place_of(file: str, text: str, line: int) -> Place | None:
    """The statement of a function at a line of a file, of one that holds others its head; None for a line of no
    function, which each import runs."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = list(ast.walk(ast.parse(text)))
    if not any(n.body[0].lineno <= line <= (n.end_lineno or 0) for n in nodes if isinstance(n, functions)):
        return None
    around = [n for n in nodes if isinstance(n, ast.stmt) and n.lineno <= line <= (n.end_lineno or 0)]
    inside = max(around, key=lambda node: node.lineno)
    body = getattr(inside, "body", None)
    first, last = inside.lineno, inside.end_lineno or line
    if body and line >= body[0].lineno:  # a line between its parts: `except`, `case`
        first = last = line
    elif body:
        last = max(first, body[0].lineno - 1)
    return file, (1 << last + 1) - (1 << first)
