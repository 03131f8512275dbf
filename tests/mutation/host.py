"""Faults in the Python that launches a family's kernels: grids, blocks, shared memory, tensor maps, scratch, arguments,
the constants of the template, generated PTX. Each is planted in the functions in memory and taken out again.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import evoattn
from evoattn.backends.compiler import CompileError
from evoattn.correctness.interpreter_cases import interpreter_cases
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.records import CompiledKernel, CompileInfo
from tests.mutation.python_faults import mutants_of as faults_of
from tests.mutation.settings import Setting
from tests.mutation.verdicts import DEAD, REFUSED, STILLBORN, Verdict, run_ptx
from tests.support.compiles import compile_ptx

PACKAGE = Path(evoattn.__file__).parent
_SHARED = ("base.py", "tensor_tiles.py", "row_blocks.py", "variants.py")
_LAUNCHING = ("constants", "launches", "workspace")
"""Methods of a family; its others, and the functions that they alone use, say which configs there are and what they
cost."""
_PAIRS = (("seqlen_q", "seqlen_k"), ("BLOCK_M", "BLOCK_N"), (".heads", ".kv_heads"), ('"k"', '"v"'), ("min(", "max("))
_WORDS = (
    *_PAIRS,
    *((new, old) for old, new in _PAIRS),
    *(("math.ceil(", "math.floor("), ("head_dim", "value_dim"), ("batch_bytes", "head_bytes")),
    *(("head_bytes", "row_bytes"), (" * problem.batch", ""), ("problem.batch * ", ""), (" * problem.kv_heads", "")),
    ("problem.heads * ", ""),
)
LIVE_CONFIGS = 6
"""Configs that a mutant may survive."""


@dataclass(frozen=True)
class HostMutant:
    """`source` instead of the file's text, which differs in one place of `line`."""

    file: str
    line: int
    what: str
    number: int
    source: str

    @property
    def kind(self) -> str:
        """The file: a sample takes files in turn."""
        return self.file

    @property
    def key(self) -> str:
        text = (PACKAGE / self.file).read_text().splitlines()[self.line - 1].strip()
        return f"{self.file} | {text} | host | {self.what} | {self.number}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}"


def files_of(family: str) -> list[str]:
    """Those of the family that say how it is launched, and what all families have."""
    paths = sorted((PACKAGE / "families" / family).glob("[a-z]*.py"))
    return [str(p.relative_to(PACKAGE)) for p in [*paths, *(PACKAGE / "families" / name for name in _SHARED)]]


def mutants_of(family: str) -> list[HostMutant]:
    """All in functions and constants of the family's files."""
    return [mutant for file in files_of(family) for mutant in mutants_in(file)]


def mutants_in(file: str) -> list[HostMutant]:
    """All in functions and constants of one file, named from the package's folder."""
    text = (PACKAGE / file).read_text()
    changed, aside = faults_of(PACKAGE / file) + list(_other_words(text)), _loop_lines(text) | _idle_lines(file)
    return [
        HostMutant(file, line, what, n, source) for n, (line, what, source) in enumerate(changed) if line not in aside
    ]


def _idle_lines(file: str) -> set[int]:
    """Lines of a family's file that launch nothing: its classes, and functions that no method of `_LAUNCHING` uses."""
    if file.count("/") < 2:
        return set()
    parsed = [ast.parse(path.read_text()) for path in (PACKAGE / file).parent.glob("*.py")]
    functions = {node.name: node for tree in parsed for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    used, found = set[str](), list(_LAUNCHING)
    while found:
        if (name := found.pop()) in functions and name not in used:
            used.add(name)
            nodes = list(ast.walk(functions[name]))
            found += [node.id for node in nodes if isinstance(node, ast.Name)]
            found += [node.attr for node in nodes if isinstance(node, ast.Attribute)]

    def lines(node: ast.stmt) -> set[int]:
        return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))

    nodes = list(ast.walk(ast.parse((PACKAGE / file).read_text())))
    idle = set[int]().union(*(lines(node) for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))))
    return idle.difference(*(lines(node) for node in nodes if isinstance(node, ast.FunctionDef) and node.name in used))


def _loop_lines(text: str) -> set[int]:
    """Lines of `while` loops: with a fault they may never end, and nothing would end them."""
    loops = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.While))
    return {line for loop in loops for line in range(loop.lineno, (loop.end_lineno or loop.lineno) + 1)}


def _other_words(text: str) -> Iterator[tuple[int, str, str]]:
    """Other names and roundings."""
    for old, new in _WORDS:
        for match in re.finditer(rf"(?<![\w]){re.escape(old)}" if old[0].isalpha() else re.escape(old), text):
            line = text.count("\n", 0, match.start()) + 1
            changed = text[: match.start()] + new + text[match.end() :]
            if not text.splitlines()[line - 1].lstrip().startswith(("from ", "import ", '"""')):
                yield line, f"{old} → {new or 'nothing'}", changed


def _functions(code: CodeType, within: str = "") -> Iterator[tuple[str, CodeType]]:
    """(qualified name, code) of the functions and methods of a module."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            name = f"{within}{const.co_name}"
            if const.co_flags & 0x2:  # CO_NEWLOCALS: a function, not a class
                yield name, const
            else:
                yield from _functions(const, f"{name}.")


def _live(module: ModuleType, name: str) -> tuple[FunctionType, Callable[[], None]] | None:
    """The function of that name, and what forgets its results."""
    found: Any = module
    for part in name.split("."):
        found = vars(found).get(part)
        if found is None:
            return None
    clear = getattr(found, "cache_clear", lambda: None)
    found = getattr(found, "fget", None) or getattr(found, "func", found)
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    found = getattr(found, "__func__", found)
    return (found, clear) if isinstance(found, FunctionType) else None


@contextmanager
def planted(mutant: HostMutant) -> Iterator[None]:
    """The fault in memory. Raises whatever running the file's constants with it raises."""
    module = importlib.import_module("evoattn." + mutant.file[:-3].replace("/", "."))
    code = compile(mutant.source, mutant.file, "exec")
    before: list[tuple[FunctionType, CodeType, Callable[[], None]]] = []
    constants = list(_changed_constants(module, mutant.source))
    for name, body in _functions(code):
        live = _live(module, name)
        if live and live[0].__code__.co_freevars == body.co_freevars:
            before.append((live[0], live[0].__code__, live[1]))
            live[0].__code__ = body
            live[1]()
    for other, name, _, new in constants:
        setattr(other, name, new)
    try:
        yield
    finally:
        for function, body, clear in before:
            function.__code__ = body
            clear()
        for other, name, old, _ in constants:
            setattr(other, name, old)


def _changed_constants(module: ModuleType, source: str) -> Iterator[tuple[ModuleType, str, Any, Any]]:
    """(module, name, old, new) of the numbers of a module that the source has otherwise, wherever they are imported."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign):
            continue
        new = dict(vars(module))
        exec(compile(ast.Module([node], []), "constants", "exec"), new)
        for name in (n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)):
            old = vars(module).get(name)
            if not isinstance(old, int | float | tuple) or old == new[name]:
                continue
            for other in [m for path, m in sys.modules.items() if path.startswith("evoattn.")]:
                if name in vars(other) and vars(other)[name] == old:
                    yield other, name, old, new[name]


def _trace(setting: Setting) -> tuple[str, list[str]]:
    """The source, and how each case is launched."""
    family = FAMILIES[setting.family]
    source = render(family, setting.problem, setting.config, GPUS[setting.gpu]).source
    built = BuiltKernel(family, setting.config, GPUS[setting.gpu], CompiledKernel(b"", "", CompileInfo()))
    launched = []
    for small in interpreter_cases(setting.problem, setting.config):
        kernel = small.placed(built)
        launched.append(f"{kernel.launches(small.problem)} {kernel.workspace(small.problem)}")
    return source, launched


_RIGHT: dict[str, tuple[str, list[str]]] = {}
"""By setting the trace of the Python as it is."""


def judge(mutant: HostMutant, settings: list[Setting], seed: int) -> Verdict:
    """As `verdicts.judge`, of a fault in Python."""
    family = settings[0].family
    found, live = Verdict(family, mutant.key, str(mutant), DEAD), 0
    for setting in settings:
        if str(setting) not in _RIGHT:
            _RIGHT[str(setting)] = _trace(setting)
        right, ptx = _RIGHT[str(setting)], setting.ptx
        try:
            with planted(mutant):
                trace = _trace(setting)
                if trace == right:
                    continue
                live += 1
                if trace[0] != right[0]:
                    ptx = compile_ptx(trace[0], GPUS[setting.gpu].arch)
                verdict, reason = run_ptx(setting, ptx, seed)
        except CompileError as error:
            verdict, reason = REFUSED, str(error)
        except Exception as error:  # a fault that stops the search is noticed
            verdict, reason = (REFUSED if live else STILLBORN), f"{type(error).__name__}: {error}"
        found = Verdict(family, mutant.key, str(mutant), verdict, reason, setting.row())
        if found.killed or not found.live or live == LIVE_CONFIGS:
            break
    return found
