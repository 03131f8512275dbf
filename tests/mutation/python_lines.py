"""Which tests run which statements of evoattn, so that a mutant meets those alone that can notice it."""

import ast
import json
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType

Place = tuple[str, int, int]
"""A file relative to the sources, and the first and last line of a statement of it, or of its head."""
WATCHED = "EVOATTN_WATCHED"
"""Names a file for the processes that tests start, with JSON: the folder of the sources, a file to write to, places."""


class Calls:
    """Keeps which of some places below a folder this process runs, and the processes that it starts, which add theirs
    to a file."""

    def __init__(self, root: Path, said: Path, places: Iterable[Place], started: bool = False) -> None:
        self._places: dict[str, dict[int, list[int]]] = {}  # by file and line
        for number, (file, first, last) in enumerate(places):
            for line in range(first, last + 1):
                self._places.setdefault(f"{root}/{file}", {}).setdefault(line, []).append(number)
        self._said, self._seen, self._read = said, set[int](), 0
        self._child = started
        os.register_at_fork(after_in_child=self._forked)
        if sys.version_info >= (3, 12):
            events = sys.monitoring.events
            sys.monitoring.use_tool_id(sys.monitoring.PROFILER_ID, "calls")
            sys.monitoring.register_callback(sys.monitoring.PROFILER_ID, events.PY_START, self._begin)
            sys.monitoring.register_callback(sys.monitoring.PROFILER_ID, events.LINE, self._line)
            sys.monitoring.set_events(sys.monitoring.PROFILER_ID, events.PY_START)
        else:
            threading.settrace(self._see)
            sys.settrace(self._see)

    def _forked(self) -> None:
        self._child = True

    def _add(self, numbers: Iterable[int]) -> None:
        new = {*numbers} - self._seen
        self._seen |= new
        if self._child and new:
            with self._said.open("a") as file:
                file.write("".join(f"{number}\n" for number in new))

    if sys.version_info >= (3, 12):

        def _begin(self, code: CodeType, _: int) -> object:
            if self._within(code):  # its lines are heard of one by one, each once
                sys.monitoring.set_local_events(sys.monitoring.PROFILER_ID, code, sys.monitoring.events.LINE)
            return sys.monitoring.DISABLE

        def _line(self, code: CodeType, line: int) -> object:
            self._add(self._places[code.co_filename].get(line, ()))
            return sys.monitoring.DISABLE

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if frame.f_code.co_filename in self._places:
            self._add(self._within(frame.f_code))

    def _within(self, code: CodeType) -> set[int]:
        """The places of a function."""
        places = {} if code.co_name == "<module>" else self._places.get(code.co_filename, {})
        return {number for _, _, line in code.co_lines() if line for number in places.get(line, ())}

    def take(self) -> list[int]:
        """The numbers of the places that ran since this was called last."""
        text = self._said.read_text() if self._said.exists() else ""
        found = self._seen | {int(number) for number in text[self._read : text.rfind("\n") + 1].split()}
        self._read, self._seen = text.rfind("\n") + 1, set()
        if sys.version_info >= (3, 12):
            sys.monitoring.restart_events()
        return sorted(found)


def watch_this_process() -> None:
    """Of one that a test started: see `WATCHED`."""
    if WATCHED in os.environ:
        root, said, places = json.loads(Path(os.environ[WATCHED]).read_text())
        Calls(Path(root), Path(said), map(tuple, places), started=True)


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
    if body and line >= body[0].lineno:  # a line between its parts: `except`, `case`
        return file, line, line
    return file, inside.lineno, max(inside.lineno, body[0].lineno - 1) if body else inside.end_lineno or line
