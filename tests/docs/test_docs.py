"""The documentation: links lead somewhere, commands are what the command line takes, examples run, pictures fit; pages
of choices, data and variants say what the tables say; each program has its row."""

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import evoattn
from evoattn.cli.main import app
from evoattn.cost import measurements
from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.paths import ROOT
from evoattn.model.problem import OPERATIONS
from evoattn.model.shape_text import parse_shape
from evoattn.portfolio.pick import list_for
from evoattn.search.api import search
from scripts import results_page
from tests.test_architecture import LAYERS

FOLDERS = "scripts", "benchmarks", "tests"
EXTERNAL = ("http://", "https://", "#", "mailto:")
FENCE = re.compile(r"(?:<!-- (runs on a CPU) -->\n)?^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMANDS = typer.main.get_command(app).commands
RUNS, CPU = "runs on a CPU", {"CUDA_VISIBLE_DEVICES": ""}


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository; those of the working tree's folders where git is not here."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", *patterns],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        return [ROOT / name for name in listed if (ROOT / name).exists()]
    except (OSError, subprocess.CalledProcessError):
        folders = ("benchmarks", "docs", "evoattn", "reports", "scripts", "search_spaces", "templates", "tests")
        found = [p for pattern in patterns for folder in folders for p in (ROOT / folder).rglob(pattern)]
        return sorted({*found, *(p for pattern in patterns for p in ROOT.glob(pattern))})


PAGES = tracked("*.md")
PLACES = {path.relative_to(ROOT).as_posix(): path for path in PAGES}


def fences(path: Path, language: str) -> list[tuple[bool, str]]:
    """(whether it is marked as running on a CPU, text) of each block of code in that language."""
    return [(bool(runs), text) for runs, tongue, text in FENCE.findall(path.read_text()) if tongue == language]


def anchors(path: Path) -> set[str]:
    """Headings, as GitHub makes links of them."""
    heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("name", PLACES)
def test_links_lead_somewhere(name):
    for target in LINK.findall(PLACES[name].read_text()):
        if target.startswith(EXTERNAL[:2]):
            continue
        place, _, anchor = target.partition("#")
        path = (PLACES[name].parent / place).resolve() if place else PLACES[name]
        assert path.exists(), f"{name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{name} links to {target}"


def quoted_commands() -> list[tuple[str, str]]:
    """(page, command line) of every `evoattn …` in a block without a language, or in a line of its own words."""
    found = []
    for name, path in PLACES.items():
        text = path.read_text()
        lines = [line for _, block in fences(path, "") for line in block.replace("\\\n", " ").splitlines()]
        inline = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
        found += [(name, line.strip()) for line in (*lines, *inline) if re.match(r"\s*evoattn( [\w-]|$)", line)]
    return found


@pytest.mark.parametrize(("page", "line"), quoted_commands())
def test_commands_are_what_the_command_line_takes(page, line):
    line = re.sub(r"\[[^\]]*\]|\.\.\.|…", " ", line.partition("  #")[0].replace("|", " "))
    words = shlex.split(line.partition(" # ")[0])[1:]
    if not words or words[0].startswith("--"):
        assert not words or words[0] in {"--version", "--install-completion", "--show-completion", "--help"}
        return
    assert words[0] in COMMANDS, f"{page} names the command {words[0]!r}"
    command, *words = COMMANDS[words[0]], *words[1:]
    if words and words[0] in getattr(command, "commands", {}):
        command, *words = command.commands[words[0]], *words[1:]
    options = {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
    for word in words:
        if word.startswith("-") and word != "-":
            assert word.partition("=")[0] in {*options, "--help"}, f"{page}: {line!r} has no option {word!r}"


def test_the_readme_shows_commands_that_do_their_work():
    """The blocks of the README are there at all, so that the test above holds them to something."""
    shown = {line.split()[1] for page, line in quoted_commands() if page == "README.md" and " " in line}
    assert {"search", "report", "export", "bench", "reproduce", "try"} <= shown


EXAMPLES = [(name, text) for name in PLACES for _, text in fences(PLACES[name], "python")]
RUNNING = [(name, text) for name in PLACES for runs, text in fences(PLACES[name], "python") if runs]


@pytest.mark.parametrize(("page", "text"), EXAMPLES)
def test_python_examples_compile(page, text):
    compile(text, page, "exec")


@pytest.mark.slow
def test_python_examples_run_on_a_cpu(tmp_path):
    """All of them in one process, each with names of its own."""
    assert {name for name, _ in RUNNING} == {
        "README.md",
        *(f"docs/{name}.md" for name in ("python", "serves", "start", "variants")),
    }
    program = "".join(f"exec({text!r}, {{'__name__': 'example'}})\n" for _, text in RUNNING)
    environment = os.environ | CPU | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr


def documented() -> dict[str, str]:
    """The section of docs/python.md under each `### evoattn.NAME`."""
    parts = (ROOT / "docs/python.md").read_text().split("\n### evoattn.")[1:]
    return {part.partition("\n")[0]: part for part in parts}


def test_every_public_name_is_documented():
    assert set(documented()) == {name for name in evoattn.__all__ if name != "__version__"}


@pytest.mark.parametrize("name", [name for name, text in documented().items() if "```python\ndef " in text])
def test_signatures_are_those_of_the_code(name):
    block = documented()[name].split("```python\n")[1].split("```")[0]
    (function,) = ast.parse(block).body
    assert isinstance(function, ast.FunctionDef) and function.name == name
    space: dict[str, object] = {}
    exec(block, space)
    code = search if name == "search" else getattr(evoattn, name)  # `evoattn.search` is a package that passes calls on
    shown, real = (inspect.signature(thing).parameters.values() for thing in (space[name], code))
    assert [(p.name, p.kind) for p in shown] == [(p.name, p.kind) for p in real]
    for one, other in zip(shown, real, strict=True):
        assert one.default is ... or one.default == other.default


def test_callables_have_their_signature_on_the_page():
    for name, text in documented().items():
        thing = getattr(evoattn, name)
        if callable(thing) and not (isinstance(thing, type) and issubclass(thing, Exception)):
            assert f"def {name}(" in text


def test_the_picture_of_the_rooms_is_that_of_the_layers():
    page = (ROOT / "docs/architecture.md").read_text()
    (picture,) = [text for _, text in fences(ROOT / "docs/architecture.md", "mermaid")]
    assert [line.split(" · ") for line in re.findall(r'^ +L\d+\["(.+)"\]$', picture, re.MULTILINE)] == LAYERS
    assert picture.splitlines()[-1].split() == " --> ".join(f"L{i}" for i in range(len(LAYERS))).split()
    assert re.findall(r"^\| `(\w+)` \| .{10}", page, re.MULTILINE) == [room for layer in LAYERS for room in layer]


def test_places_that_the_architecture_names_exist():
    text = "".join((ROOT / page).read_text() for page in ("docs/architecture.md", "CONTRIBUTING.md"))
    for place in re.findall(r"`((?:evoattn|templates|search_spaces|db|reports|tests)/[\w./]*)`", text):
        assert list(ROOT.glob(place.replace("X", "flash_mma"))), place


def test_the_results_page_is_made_of_its_data():
    text = results_page.DATA.read_text()
    runs = json.loads(text)["runs"]
    assert results_page.data_text(runs) == text
    pages = [page.read_text() for page in results_page.PAGES]
    assert [results_page.filled(page, runs) for page in pages] == pages, "run `python -m scripts.results_page`"
    assert {run["title"] for run in runs} == {part[2] for part in results_page.PLACE.findall(pages[1])}
    assert results_page.PICTURE.read_text() == results_page.picture(runs[0])


def test_a_bench_becomes_a_run_of_the_results_page():
    time = {"median_us": 10.004, "p10_us": 9.5, "p90_us": 11.0}
    row = {
        "problem": {"name": "seed_h100", "dtype": "bf16"},
        "ours": time,
        "family": "flash_mma",
        "peers": {"cudnn": time | {"median_us": 20.0}, "mine": time | {"median_us": 15.0}},
        "versions": {"cudnn": "torch 2.11"},
    }
    run = results_page.run_of_bench([row, row | {"ours": None}, row | {"peers": {}}])
    (kept,) = run["rows"]
    assert kept["ours"] == [10.0, 9.5, 11.0]
    assert kept["peers"] == {"cuDNN": [20.0, 9.5, 11.0], "mine": [15.0, 9.5, 11.0]}
    about = {"card": "C", "date": "D", "commit": "H", "command": "evoattn bench"}
    table = results_page.table(run | about)
    assert "| seed_h100, bf16 | B=1 H=16 S=1024 D=64 bf16 full |" in table and "| 0.667 |" in table
    assert "10.00 (9.50 to 11.00) | 20.00 |" in table


@pytest.mark.parametrize("flex, said", [(None, "| 0.667 | - | yes |"), (14.0, "| 0.714 | 0.714 | no |")])
def test_targets_are_shares_of_the_best_peer_and_of_flex_attention(flex, said):
    peers = {"cuDNN": [15.0, 14.0, 16.0]} | ({"FlexAttention": [flex, flex, flex]} if flex else {})
    rows = [{"problem": "seed_h100", "family": "flash_mma", "ours": [10.0], "peers": peers}]
    about = {"card": "C", "date": "D", "commit": "H", "command": "evoattn bench", "versions": "V"}
    table = results_page.table(about | {"rows": rows, "targets": [0.97, 0.7]})
    assert "≤ 0.97 and ≤ 0.7" in table and said in table


@pytest.mark.slow
def test_every_module_says_what_it_is():
    """One line that a stranger can read where the module begins."""
    modules = [
        path for path in tracked("*.py") if path.relative_to(ROOT).parts[0] in ("evoattn", "scripts", "benchmarks")
    ]
    silent = [path for path in modules if len(ast.get_docstring(ast.parse(path.read_text())) or "") < 20]
    assert modules and not silent


def test_every_script_says_by_help_what_it_is():
    texts = {path: path.read_text() for path in tracked("*.py") if path.relative_to(ROOT).parts[0] in FOLDERS}
    programs = [text for text in texts.values() if "\nif __name__ ==" in text]
    assert len(programs) > 20 and all("ArgumentParser(description=__doc__" in text for text in programs)


PROSE = [name for name in PLACES if name.count("/") == 0 or name.startswith(("docs/", "reports/"))]


@pytest.mark.parametrize("name", PROSE)
def test_prose_keeps_to_120_columns(name):
    """Tables, headings, commands and links may be longer."""
    lines = FENCE.sub("", PLACES[name].read_text()).splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith(("|", "#")) and "](" not in line]


AHEAD = (*OPERATIONS, "deterministic")
"""Words of a kind that come before its head_dim."""


def test_the_kinds_are_those_of_the_list():
    listed = list_for(GPUS["h100"])
    assert listed
    rows = re.findall(r"^\| (8|16|32) \| (.+?) \| (.+?) \|$", (ROOT / "docs/choice.md").read_text(), re.MULTILINE)
    said = set()
    for bits, variants, each in ((bits, one, each) for bits, several, each in rows for one in several.split("; ")):
        words = variants.removeprefix("none").split()
        of = [bits, *(word for word in words if word in AHEAD)]
        behind = [word for word in words if word not in AHEAD]
        said |= {" ".join((*of, f"d{dims.strip().replace('/', ' dv')}", *behind)) for dims in each.split(",")}
    assert said == set(listed.kinds)


def test_the_cards_are_those_of_the_list():
    listed = list_for(GPUS["h100"])
    text = (ROOT / "docs/choice.md").read_text()
    assert listed and f"The {' and the '.join(card.upper() for card in listed.cards)} were timed." in text


def test_every_campaign_has_its_row():
    folder = ROOT / "reports/measurements"
    rows = re.findall(r"^\| ([a-z, ]+) \| H\d+", (folder / "README.md").read_text(), re.MULTILINE)
    names = [name for path in measurements.files() for name in measurements.names(path)]
    letters = {re.sub(r".*-|\d*$", "", name) for name in names}
    assert letters == {letter for row in rows for letter in row.split(", ")}


SHAPE = "B=2,H=8,Hkv=2,S=1024,D=64,dtype=bf16,layout=bshd,mask=full"
ROWS = {
    "scale": ("scale=0.1",),
    "window, softcap, sinks, slopes, bias, expressions": (
        *("window=128:0", "softcap=50", "sink=1", "alibi=1", "bias=hs", "score=s*2"),
    ),
    "keys in use, pages": ("seqused=16:1024", "seqused=16:1024,page=16"),
    "packed sequences": ("varlen=16:1024",),
    "a block list": ("blocks=128x128:300+700",),
    "head_dim of V": ("Dv=128",),
    "K and V of 8 bits": ("kv=e4m3", "kv=int8,scales=token"),
}
LATENT = "B=2,H=16,Hkv=1,Sq=1,Sk=1024,D=192,Dv=128,shared_kv=1,dtype=bf16"


def cells():
    """(variant, family, what the page says), `the others` for the families without a column."""
    lines = (ROOT / "docs/variants.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| variant | flash_wgmma"))
    names = [word.strip() for word in lines[start].strip("|").split("|")][1:]
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        what, *said = (word.strip() for word in line.strip("|").split("|"))
        yield from ((what, named, text) for named, text in zip(names, said, strict=True))


@pytest.mark.parametrize("what, named, said", list(cells()))
def test_a_family_serves_what_the_page_says(what, named, said):
    shown = {family for _, family, _ in cells()} - {"the others"}
    families = [named] if named in registry.FAMILIES else sorted(set(registry.FAMILIES) - shown)
    shapes = [f"{SHAPE},{words}" for words in ROWS.get(what, ())] or [LATENT]
    if named == "latent_wgmma":
        shapes = [f"{LATENT},{words}" for words in ROWS.get(what, ()) if "Dv" not in words] or shapes
    for family in map(registry.lookup, families):
        plain = family.why_unsupported(parse_shape(LATENT if named == "latent_wgmma" else SHAPE), GPUS["h100"])
        for shape in shapes:
            why = family.why_unsupported(parse_shape(shape), GPUS["h100"])
            assert (why is None) == (said != "no") or (plain and named == "the others"), (family.name, shape, why)


RANGES = [(named, said) for what, named, said in cells() if what == "head_dim of V" and said != "no"]


@pytest.mark.parametrize("named, said", RANGES)
def test_the_widths_of_v_are_those_of_the_page(named, said):
    least, most = map(int, said.split(" to "))
    below = least - 8 or 4  # the widths that a problem may have: 4 and multiples of 8
    for width, served in ((below, False), (least, True), (most, True), (most + 8, False)):
        why = registry.lookup(named).why_unsupported(parse_shape(f"{SHAPE},Dv={width}"), GPUS["h100"])
        assert (why is None) == served, (width, why)


def test_packed_sequences_have_no_bias():
    shape = f"{SHAPE},varlen=16:1024,bias=hs"
    with pytest.raises(ValueError, match="bias"):
        parse_shape(shape)


OF_PROGRAMS = "scripts", "benchmarks", "tests"
COMMAND = re.compile(
    rf"\bpython3?\s+(?:(scripts/[a-z][\w/]*)\.py|-m\s+((?:{'|'.join(OF_PROGRAMS)})\.[a-z][\w.]*))(.*)", re.DOTALL
)
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
PLACE = re.compile(r"\b(?:benchmarks|docs|evoattn|reports|scripts|search_spaces|templates|tests)/[\w./*?-]*\w")
"""Of a file or a folder; may have wildcards."""


def programs() -> dict[str, ast.Module]:
    """What can be started, e.g. `scripts/cubins` or `tests/fuzz`, parsed."""
    found = {}
    for path in tracked("*.py"):
        place = path.relative_to(ROOT)
        if place.parts[0] in OF_PROGRAMS and "\nif __name__ ==" in (text := path.read_text()):
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
