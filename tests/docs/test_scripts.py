"""docs/scripts.md names every script, and commands that start scripts are what the scripts take."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from test_docs import FENCE, PLACES, ROOT, tracked

FOLDER = ROOT / "scripts"
COMMAND = re.compile(r"\bpython3?\s+(?:scripts/([a-z][\w/]*)\.py|-m\s+scripts\.([a-z][\w.]*))(.*)", re.DOTALL)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
PLACE = re.compile(r"\b(?:docs|evoattn|reports|scripts|search_spaces|templates|tests)/[\w./*?-]*\w")
"""Of a file or a folder; may have wildcards."""


def programs() -> dict[str, ast.Module]:
    """Scripts that can be started, e.g. `cost/fit`, parsed."""
    found = {}
    for path in tracked("scripts/**/*.py", "scripts/*.py", "*.py"):
        if FOLDER in path.parents and "__main__" in path.read_text():
            found[path.relative_to(FOLDER).with_suffix("").as_posix()] = ast.parse(path.read_text())
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
    """(script, its words) of every command in a text, up to two spaces, a comment, or `--`, behind which stand words of
    another program."""
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


def test_the_page_names_every_script():
    named = set(re.findall(r"^\| `([\w/]+)\.(?:py|sh)`", (ROOT / "docs/scripts.md").read_text(), re.MULTILINE))
    shells = {path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.sh")}
    assert named == {*PROGRAMS, *shells}, "docs/scripts.md has a row per script"


@pytest.mark.parametrize("name", PLACES)
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
        assert list(ROOT.glob(place)), f"{name} names {place}"


def test_commands_are_found():
    """So that the tests above hold something."""
    text = (
        "python3 scripts/cheats.py --offline \\\n  --db F  # --not\nnice python -m scripts.cost.fit --jobs 2 -- --that"
    )
    assert commands(text) == [("cheats", "--offline --db F"), ("cost/fit", "--jobs 2")]
    assert options("cheats") == {"--help", "--offline", "--db"}
    assert sum(len(quoted(page)) for page in PLACES.values()) > 40
