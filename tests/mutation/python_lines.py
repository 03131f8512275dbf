"""Which files of tests call which functions of evoattn, so that a mutant meets those alone that can notice it."""

import ast
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType

Called = dict[str, list[tuple[int, int]]]
"""By file relative to the sources: first and last line of each function that ran. The file `""` is there if processes
were started, of whose functions nothing is known."""
STARTS = "multiprocessing/process.py"
"""Whose `start` no audit hook hears of where it spawns."""
FAST = sys.version_info >= (3, 12)
"""A function is heard of once: the interpreter of PTX runs as fast as it does unwatched."""


class Calls:
    """Keeps the functions below a folder that this process calls, from now on."""

    def __init__(self, root: Path) -> None:
        self._root, self._codes, self._starts = f"{root}/", set[CodeType](), False
        sys.addaudithook(self._hear)
        if sys.version_info >= (3, 12):
            monitoring = sys.monitoring
            begins = monitoring.events.PY_START

            def begin(code: CodeType, _: int) -> object:
                self._codes.add(code)
                return monitoring.DISABLE

            monitoring.use_tool_id(monitoring.PROFILER_ID, "calls")
            monitoring.register_callback(monitoring.PROFILER_ID, begins, begin)
            monitoring.set_events(monitoring.PROFILER_ID, begins)
        else:
            threading.settrace(self._see)
            sys.settrace(self._see)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        self._codes.add(frame.f_code)

    def _hear(self, event: str, words: tuple[object, ...]) -> None:
        python = event == "subprocess.Popen" and "python" in f"{words[:2]}"
        self._starts = self._starts or python or event == "os.fork"

    def found(self) -> Called:
        """What ran until now; threads that still run may add to it."""
        codes = self._codes.copy()
        starts = any(code.co_filename.endswith(STARTS) and code.co_name == "start" for code in codes)
        found: Called = {"": []} if self._starts or starts else {}
        for code in codes:
            lines = [line for _, _, line in code.co_lines() if line]
            if code.co_filename.startswith(self._root) and code.co_name != "<module>" and lines:
                found.setdefault(code.co_filename.removeprefix(self._root), []).append((min(lines), max(lines)))
        return found


def callers(called: Mapping[str, Called], file: str, text: str, line: int) -> list[str] | None:
    """The files of tests that run the function at a line of a file, or start processes; None for a line of no function,
    which each import runs."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, functions)]
    around = [node for node in found if node.lineno < line <= (node.end_lineno or 0)]
    if not around:
        return None
    inside = max(around, key=lambda node: node.lineno)
    return [
        test
        for test, files in called.items()
        if "" in files or any(first <= inside.body[0].lineno <= last for first, last in files.get(file, ()))
    ]
