"""Which tests run which lines of evoattn, so that a mutant meets the tests of its line first."""

from __future__ import annotations

import ast
import multiprocessing.process
import os
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

Reached = dict[str, dict[str, int]]
"""By test, by file relative to the sources: a bit for each line that ran, bit 0 that of line 0. The file `""` has a bit
if the test starts processes, whose lines are not known."""
STARTS = {"subprocess.Popen", "os.posix_spawn", "os.fork"}


class Lines:
    """A plugin of pytest that keeps the lines that each test runs in its own process; none before Python 3.12."""

    def __init__(self, root: Path) -> None:
        self._root, self._now = str(root) + os.sep, dict[str, int]()
        self.by_test: Reached = {}
        self._watch: Any = getattr(sys, "monitoring", None)
        if watch := self._watch:
            multiprocessing.process.BaseProcess.start = self._started  # type: ignore[method-assign]
            watch.use_tool_id(watch.COVERAGE_ID, "evoattn")
            watch.register_callback(watch.COVERAGE_ID, watch.events.LINE, self._line)
            watch.set_events(watch.COVERAGE_ID, watch.events.LINE)
            self._over = watch.DISABLE
            sys.addaudithook(self._audit)

    def _line(self, code: CodeType, line: int) -> Any:
        name = code.co_filename
        if name.startswith(self._root):
            name = name[len(self._root) :]
            self._now[name] = self._now.get(name, 0) | 1 << line
        return self._over

    def _audit(self, event: str, _: object) -> None:
        if event in STARTS:
            self._now[""] = 1

    @property
    def _started(self) -> Any:
        """`Process.start` as it is, which no audit hook hears of where it spawns."""
        start = multiprocessing.process.BaseProcess.start

        def started(process: Any) -> None:
            self._now[""] = 1
            start(process)

        return started

    def pytest_runtest_logstart(self) -> None:
        if self._watch:
            self._now = {}
            self._watch.restart_events()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if self._watch:
            self.by_test[nodeid] = {name: bits for name, bits in self._now.items() if not name.startswith("tests/")}


class Chosen:
    """A plugin of pytest that runs some tests alone: files, or tests of files."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if {item.nodeid, item.nodeid.split("::")[0]} & self._names]


@cache
def _nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def spans(text: str, line: int) -> tuple[int, int] | None:
    """Bits of the lines of the statement at a line, its head alone if others are in it, and of the function around;
    None for a line that runs as the module is imported."""
    function, statement = 0, 0
    for node in _nested(text, line):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno < line:
            function = _bits(node.body[0].lineno, node.end_lineno or 0)
        if isinstance(node, ast.stmt):
            inner = [one.lineno for one in getattr(node, "body", []) if isinstance(one, ast.stmt)]
            statement = _bits(node.lineno, max(node.lineno, inner[0] - 1) if inner else node.end_lineno or 0)
    return (statement, function) if function else None


def _nested(text: str, line: int) -> Iterator[ast.AST]:
    """The nodes around a line, the outermost first."""
    found = [n for n in _nodes(text) if getattr(n, "lineno", line + 1) <= line <= (getattr(n, "end_lineno", 0) or 0)]
    return iter(sorted(found, key=lambda node: (node.lineno, -node.end_lineno)))  # type: ignore[attr-defined]


def _bits(first: int, last: int) -> int:
    return (1 << last + 1) - (1 << first)


def reached_by(reached: Reached, file: str, bits: int) -> list[str]:
    """The tests that run one of these lines of a file."""
    return [test for test, lines in reached.items() if lines.get(file, 0) & bits]
