"""scripts/README.md names every program beside the package, and commands that start one are what it takes."""

import ast
import re
from pathlib import Path

import pytest

from tests.docs.test_docs import FENCE, PLACES, ROOT, tracked

FOLDERS = "scripts", "benchmarks", "tests"
COMMAND = re.compile(
    rf"\bpython3?\s+(?:(scripts/[a-z][\w/]*)\.py|-m\s+((?:{'|'.join(FOLDERS)})\.[a-z][\w.]*))(.*)", re.DOTALL
)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
PLACE = re.compile(r"\b(?:benchmarks|docs|evoattn|reports|scripts|search_spaces|templates|tests)/[\w./*?-]*\w")
"""Of a file or a folder; may have wildcards."""


def programs() -> dict[str, ast.Module]:
    """What can be started, e.g. `scripts/cubins` or `tests/fuzz`, parsed."""
    found = {}
    for path in tracked("*.py"):
        place = path.relative_to(ROOT)
        if place.parts[0] in FOLDERS and "\nif __name__ ==" in (text := path.read_text()):
            found[place.with_suffix("").as_posix().removesuffix("/__main__")] = ast.parse(text)
    return found


PROGRAMS = programs()


def options(name: str) -> set[str]:
    """What a script's parser takes by name."""
    nodes = list(ast.walk(PROGRAMS[name]))
    words = [arg for node in nodes if adds(node) for arg in node.args]
    loops = [node for node in nodes if isinstance(node, ast.For) and any(map(adds, ast.walk(node)))]
    texts = [word.value for word in words if isinstance(word, ast.Constant)]
    looped = [word for loop in loops for word in ast.walk(loop.iter) if isinstance(word, ast.Constant)]
    texts += [f"--{word.value.lstrip('-')}" for word in looped]
    return {"--help", *(text for text in texts if text.startswith("--"))}


def adds(node: ast.AST) -> bool:
    """Whether it is a call of `add_argument`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"


def commands(text: str) -> list[tuple[str, str]]:
    """(program, its words) of every command in a text, up to two spaces, a comment, or `--`: words of another program
    stand behind it."""
    found = []
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        if match := COMMAND.search(line.strip()):
            words = re.split(r"  | #|-- |`", match[3])[0]
            found.append((match[1] or match[2].replace(".", "/"), words.strip()))
    return found


def quoted(page: Path) -> list[tuple[str, str]]:
    """Commands in a page's blocks, and between its backticks, where they may go on in a second line."""
    text = page.read_text()
    blocks = [block for _, language, block in FENCE.findall(text) if not language]
    inline = [words.replace("\n", " ") for words in re.findall(r"`([^`]+)`", FENCE.sub("", text))]
    return commands("\n".join([*blocks, *inline]))


def test_the_page_names_every_program():
    rows = re.findall(r"^\| `(.+?)`", (ROOT / "scripts/README.md").read_text(), re.MULTILINE)
    named = {program for row in rows for program, _ in commands(row)}
    shells = {row for row in rows if row.endswith(".sh")}
    assert named == set(PROGRAMS), "scripts/README.md has a row per program"
    assert shells == {path.relative_to(ROOT).as_posix() for path in tracked("*.sh") if path.parent.name != ".ci"}


@pytest.mark.parametrize("name", [name for name in PLACES if not name.startswith("reports/")])  # a log of its day
def test_pages_start_scripts_with_options_that_they_have(name):
    for script, words in quoted(PLACES[name]):
        assert script in PROGRAMS, f"{name} starts {script}"
        unknown = set(OPTION.findall(words)) - options(script)
        assert not unknown, f"{name}: {script} has no {unknown}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_scripts_say_what_they_take(name):
    """The options and the places that a script's help names are there."""
    said = ast.get_docstring(PROGRAMS[name]) or ""
    usage = [line for line in said.splitlines() if COMMAND.search(line)]
    for script, words in commands("\n".join(usage)):
        unknown = set(OPTION.findall(words)) - options(script)
        assert not unknown, f"{name}: {script} has no {unknown}"
    for place in PLACE.findall(said):
        assert list(ROOT.glob(re.sub(r"(\.npz)/.*", r"\1", place))), f"{name} names {place}"  # a campaign of a card


def test_commands_are_found():
    """So that the tests above hold something."""
    text = "python -m tests.cheats --offline \\\n  --db F  # --not\nnice python3 scripts/floors.py --jobs 2 -- --that"
    assert commands(text) == [("tests/cheats", "--offline --db F"), ("scripts/floors", "--jobs 2")]
    assert options("tests/cheats") == {"--help", "--offline", "--db"}
    assert sum(len(quoted(page)) for page in PLACES.values()) > 40
