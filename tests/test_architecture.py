"""Imports point down, each heavy library has its home, templates are plain below the marker.

`python -m tests.test_architecture` prints measures of the house: lines, rooms, arrows, wide and complex functions, the
files that a plain call goes through."""

import argparse
import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from pathlib import Path

import pytest

from evoattn.families.render import MARKER
from evoattn.model import backward, forward
from evoattn.model.paths import ROOT, TEMPLATES

LAYERS = [  # docs/architecture.md shows them; a module may import from its own layer's packages and from below
    ["cli"],
    ["bench", "dashboard", "export", "integrations", "ops", "report", "search"],
    ["portfolio"],
    ["engine"],
    ["samplers", "storage"],
    ["fleet"],
    ["evaluation"],
    ["profiling"],
    ["peers", "timing"],
    ["correctness"],
    ["backends", "cost"],
    ["families", "ptx"],
    ["model"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
HOMES = {  # files, or rooms of which any file may
    "cupy": {"backends"},
    "optuna": {"samplers", "dashboard/mirror.py"},
    "optuna_dashboard": {"dashboard"},
    "psycopg": {"storage"},
    "sqlalchemy": {"storage"},
    "alembic": {"storage"},
    "jinja2": {"families/render.py", "report/page.py"},
    "typer": {"cli"},
    "ray": {"fleet"},
    "pynvml": {"timing/clocks.py"},
    "transformers": {"integrations"},
    "vllm": {"integrations"},
    "sglang": {"integrations"},
    "diffusers": {"integrations"},
    "xformers": {"integrations"},
    "sklearn": {"samplers", "cost"},
}


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def modules() -> list[tuple[str, Path]]:
    """(room, file): the room is the module or package right under `evoattn`."""
    package = ROOT / "evoattn"
    files = [p for p in package.rglob("*.py") if p.parent != package]
    return [(p.relative_to(package).parts[0].removesuffix(".py"), p) for p in files]


@pytest.mark.slow
def test_every_module_can_be_imported():
    for _, path in modules():
        import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))


def test_every_room_has_a_layer():
    assert {room for room, _ in modules()} == set(RANK)


@pytest.mark.slow
def test_imports_point_down():
    wrong = []
    for room, path in modules():
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "evoattn" and len(parts) > 1 and parts[1] in RANK and RANK[parts[1]] < RANK[room]:
                wrong.append(f"{path.name} imports {name}")
    assert not wrong


NAMED_BY = {"model", "correctness", "families", "peers", "integrations", "ptx"}
"""Rooms that name tensors: of the operations and their proofs, of kernels, and of other projects; `ptx` names types."""
CALLS = "beside.py"
"""The calls of operations beside attention, each of which names its own tensors."""
NO_TENSORS = {("campaign.py", "dv")}
"""A key of a shape's text."""


@pytest.mark.slow
def test_only_operations_name_their_tensors():
    words = {*forward.MAIN, *backward.GIVEN, *backward.MADE, "qk", "qkv", "qkvo"}
    said = {
        (path.name, node.value)
        for room, path in modules()
        if room not in NAMED_BY and path.name != CALLS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in words
    }
    assert said == NO_TENSORS, "the specs of an operation have the names"


@pytest.mark.slow
def test_libraries_stay_in_their_homes():
    wrong = []
    for room, path in modules():
        file = path.relative_to(ROOT / "evoattn").as_posix()
        for name in imports(path):
            if not {room, file} & HOMES.get(name.split(".")[0], {room}):
                wrong.append(f"{file} imports {name}")
    assert not wrong


def test_templates_are_plain_cuda_below_the_marker():
    templates = list(TEMPLATES.glob("*.cu.j2"))
    assert templates
    for path in templates:
        _, marker, below = path.read_text().partition(MARKER)
        assert marker, path.name
        assert not any(sign in below for sign in ("{{", "{%", "{#")), path.name
        assert "asm" not in below, f"{path.name}: PTX belongs under templates/device"


def test_constexpr_functions_are_for_the_device():
    """NVRTC takes every function as a device function (-default-device), plain nvcc, which builds the exports, does
    not."""
    for path in (*TEMPLATES.glob("*.cu.j2"), *TEMPLATES.rglob("*.cuh")):
        for line in path.read_text().splitlines():
            if re.search(r"(?<!if )constexpr\b[^=(]*\w+\([^()]*\)\s*\{", line):
                assert "__device__" in line, f"{path.name}: {line.strip()}"


def imported_modules(path: Path, known: frozenset[str]) -> set[str]:
    """Those of `known` that a file imports, wherever in it; `from package import module` is the module alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & known) | ({node.module} if inner - known else set())
    return found & known


def circles(arrows: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of modules that reach each other (Tarjan, Depth-first search and linear graph algorithms, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = set()

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(arrows[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            start = stack.index(name)
            if len(stack) - start > 1:
                found.add(frozenset(stack[start:]))
            del stack[start:]

    for name in arrows:
        if name not in index:
            visit(name)
    return found


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == {frozenset("abc")}


@pytest.mark.slow
def test_no_modules_import_each_other():
    """Wherever in the files, under TYPE_CHECKING too; the public face, which imports when asked, aside."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for _, path in modules()
    }
    known = frozenset(files)
    assert not circles({name: imported_modules(path, known) - {name} for name, path in files.items()})


def test_python_files_are_short():
    """At most 600 lines of 120 columns, in every file that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    texts = {
        name: (ROOT / name).read_text().splitlines() for name in listed.stdout.split("\0") if (ROOT / name).is_file()
    }
    assert len(texts) > 100
    assert not {name: len(lines) for name, lines in texts.items() if len(lines) > 600}
    assert not [f"{name}:{i}" for name, lines in texts.items() for i, line in enumerate(lines, 1) if len(line) > 120]


def test_git_tracks_nothing_that_it_ignores():
    """A tracked link `.venv`, as worktrees have one, deletes the environment of a checkout that it is merged into."""
    words = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert listed.stdout == "", f"git rm --cached {listed.stdout}"


def arrows() -> Iterator[tuple[str, str]]:
    """(room, room that one of its files imports)."""
    for room, path in modules():
        for parts in (name.split(".") for name in imports(path)):
            if parts[0] == "evoattn" and len(parts) > 1 and parts[1] in RANK and parts[1] != room:
                yield room, parts[1]


def wide_functions(most: int) -> list[str]:
    """Functions of more parameters than `most`, with their file and how many they have."""
    found = []
    for _, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                if (count := sum(one.arg not in ("self", "cls") for one in given)) > most:
                    found.append(f"{path.relative_to(ROOT)} {node.name} {count}")
    return found


def files_of_a_call() -> list[str]:
    """Those of evoattn that a plain call enters which was decided before, on a device that does nothing."""
    import torch

    import evoattn
    from benchmarks.calls.no_device import NoDevice, no_code
    from evoattn.ops.runtime import Runtime, current
    from evoattn.portfolio.pick import lasting_pick, next_picks

    entered: dict[str, None] = {}
    query, key, value = (torch.zeros(1, 16, 1024, 64, dtype=torch.float16) for _ in range(3))
    made = partial(Runtime, NoDevice("h100"), lasting_pick, build=no_code, others=next_picks)
    with tempfile.TemporaryDirectory() as folder, current.use(made(Path(folder))), torch.no_grad():
        evoattn.attention(query, key, value)
        sys.setprofile(lambda frame, *_: entered.setdefault(frame.f_code.co_filename))
        evoattn.attention(query, key, value)
        sys.setprofile(None)
    return [str(Path(name).relative_to(ROOT)) for name in entered if name.startswith(str(ROOT / "evoattn"))]


@pytest.mark.slow
def test_a_plain_call_enters_few_files():
    assert len(files_of_a_call()) <= 6


def measures() -> Iterator[str]:
    """A line each."""
    for folder in ("evoattn", "templates", "tests", "benchmarks", "scripts"):
        words = ["git", "ls-files", *(f"{folder}/*.{kind}" for kind in ("py", "cuh", "j2", "cu", "h"))]
        files = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        yield f"{folder}: {sum((ROOT / file).read_text().count(chr(10)) for file in files)} lines, {len(files)} files"
    found = set(arrows())
    upward = sum(RANK[below] < RANK[room] for room, below in found)
    yield f"{len(RANK)} rooms, {len(found)} arrows, {upward} upward"
    wide, call = wide_functions(7), files_of_a_call()
    yield f"{len(wide)} functions over 7 parameters: {', '.join(wide)}"
    ruff = [sys.executable, "-m", "ruff", "check", "--ignore-noqa", "--select", "C901", "--output-format", "concise"]
    yield f"complexity over 15: {subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True).stdout.strip()}"
    yield f"a plain call, decided before: {len(call)} files: {', '.join(call)}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(*measures(), sep="\n")
