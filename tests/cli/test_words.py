"""What is typed: wrong words are refused at once and in one sentence, before anything slow is imported. Texts are
UTF-8 whatever the locale says, and the command line answers where the locale knows ASCII alone."""

import ast
import os
import re
import subprocess
import sys
from functools import cache

import pytest
import typer
from typer.testing import CliRunner

import evoattn
from evoattn import FailedRun, __version__
from evoattn.cli.main import app
from evoattn.cli.search import SHAPE_HELP
from evoattn.model.paths import ROOT
from evoattn.model.shape_text import parse_shape
from evoattn.model.variant import VARIANTS
from tests.cli.terminal import SHAPE, WIDTH, refused, run

SLOW = ("torch", "optuna", "sqlalchemy", "alembic", "cupy", "jinja2", "plotly", "numpy", "rich")


def search_without(names, ending, command):
    """A search in a process of its own, where the import of any of these modules ends with `ending`."""
    code = (
        "import sys\nclass Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name in {names!r}: raise {ending}\n"
        f"sys.meta_path.insert(0, Finder())\n{command}"
    )
    words = [sys.executable, "-c", code, "search", "--gpu", "l4", "--shape", SHAPE]
    return subprocess.run(words, capture_output=True, text=True, timeout=600, env={"CUDA_VISIBLE_DEVICES": ""})


WRONG = [
    ("search", "--gpu", "l4", "--shape", "B=1,H=16,S=1024,D=64,mask=window"),
    ("search", "--gpu", "gtx"),
    ("search", "--gpu", "l4", "--sampler", "oracle"),
    ("search", "--gpu", "l4", "--budget", "soon"),
    ("search", "--gpu", "l4", "--famly", "flash_mma"),
    ("try", "flash_mma", "--gpu", "l4", "--shape", "B=1"),
    ("show", "best", "--shape", "B=1"),
    ("report", "--format", "pdf"),
    ("bench", "nothing"),
]
REFUSALS = f"""
import sys
from evoattn.cli.main import app
for words in {WRONG!r}:
    try:
        app(words)
    except SystemExit as end:
        print(words, end.code, [name for name in {SLOW!r} if name in sys.modules])
"""


@pytest.mark.slow
def test_a_wrong_word_is_refused_before_anything_slow_is_imported():
    done = subprocess.run([sys.executable, "-c", REFUSALS], capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == [f"{words} 2 []" for words in WRONG]


@pytest.mark.slow
def test_a_search_speaks_before_it_imports_anything_slow():
    """What stands on the screen first is printed before torch, which takes seconds, is looked for. jinja2 and NumPy
    alone come earlier: the processes that compile are asked for first, and render what the cost model ranks first."""
    blocked = tuple(name for name in SLOW if name not in ("jinja2", "numpy"))
    done = search_without(blocked, "SystemExit(name)", "from evoattn.cli.main import app\napp(sys.argv[1:])")
    assert done.returncode == 1
    first, second = done.stdout.splitlines()[:2]
    assert first == "Problem B=1 H=2 S=96 D=32 fp16 full; budget 10m."
    assert second == "No CUDA device: searching offline for the L4 (sm_89)."


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, expected",
    [
        (("serch",), "No such command 'serch'. Did you mean 'search'"),
        (("search", "--gpuu", "l4"), "No such option: --gpuu"),
        (("search", "--jobs", "many"), "--jobs"),
        (("search", "--jobs", "0"), "--jobs"),
        (("dashboard", "--port", "65536"), "--port"),
        (("show",), "Missing argument 'TRIAL'"),
        (("export", "best", "--format", "pdf"), "Invalid value for '--format': 'pdf' is not one of 'check', 'header'"),
        (("bench", "seed_h100", "--peers", "fa9"), "A peer is one of flash, cudnn"),
        (("show", "best", "--study", "x", "--shape", "B=1,H=2,S=96,D=32"), "not both"),
        (("report", "x", "--study", "y"), "Give the study once"),
        (("export", "best", "--shape", "B=1,H=2,S=96,D=32", "--problem", "seed_h100"), "not both"),
        (("search", "--gpu", "rtx409"), "Did you mean rtx4090?"),
        (("search", "--gpu", "l4", "--shape", ""), "'' is not part of a shape"),
        (("pick", "--gpu", "l4", "--problem", ""), "Unknown problem ''"),
        (("search", "--gpu", "l4", "--study", ""), "leave --study out"),
        (("search", "--gpu", "l4", "--study", "a\nb"), "The name of a study has only characters that can be printed"),
        (("search", "--gpu", "l4", "--study", "a\x1b[2J"), r"'a\x1b[2J' has others"),
        (("search", "--gpu", "l4", "--study", "a\udcffb"), r"'a\udcffb' has others"),
        (("search", "--gpu", "l4", "--shape", "seed_h100"), "the name of a problem"),
        (("search", "--gpu", "l4", "--problem", "B=1,H=2,S=96,D=32"), "--shape takes it."),
        (
            ("search", "--gpu", "l4", "--shape", "B=1", "H=2", "S=96", "D=32"),
            "a shape with spaces in it stands in quotes",
        ),
        (("search", "--gpu", "l4", "--problem", "seed_h10"), "Did you mean seed_h100?"),
        (("search", "--gpu", "l4", "--sampler", "geneti"), "Did you mean genetic?"),
        (("search", "--gpu", "l4", "--family", "Flash_MM"), "Did you mean flash_mma?"),
        (("search", "--gpu", "l4", "--set", "BLOCKM=64"), "Did you mean BLOCK_M?"),
        (("try", "flash_mma", "--gpu", "l4", "BLOCKM=64"), "Did you mean BLOCK_M?"),
        (("try", "flash_mma", "--gpu", "l4", "BLOCK_M"), "A parameter is set by NAME=VALUE"),
    ],
)
def test_what_the_parser_refuses_is_one_sentence_too(words, expected):
    refused(run(*words), 2, expected)


def test_a_word_like_no_other_gets_no_suggestion():
    said = run("search", "--gpu", "qqq").stderr
    assert "evoattn has a10, a100" in said and "Did you mean" not in said


@pytest.mark.parametrize(
    ("card", "arch"), [("t4", "sm_75"), ("Tesla V100-SXM2-16GB", "sm_70"), ("RTX 2080 Ti", "sm_75")]
)
def test_a_card_that_is_too_old_is_said_to_be(card, arch):
    said = run("search", "--gpu", card).stderr
    assert f"is {arch}, which is too old" in said and "Ampere" in said


@pytest.mark.parametrize(
    ("words", "count", "first"),
    [
        ("search --gpu rtx4", 3, "rtx4080"),
        ("search --problem paged_", 3, "paged_decode_16"),
        ("search --family split", 3, "split_kv"),
        ("search --sampler gu", 3, "guided"),
        ("report --study x", 3, ""),
    ],
)
def test_a_shell_completes_values(words, count, first, tmp_path):
    asked = {"COMP_WORDS": f"evoattn {words}", "COMP_CWORD": str(count), "_EVOATTN_COMPLETE": "complete_bash"}
    env = asked | {"EVOATTN_DB": str(tmp_path / "none.sqlite")}
    assert CliRunner().invoke(app, [], env=env, prog_name="evoattn").output.split("\n")[0] == first


def test_python_is_told_of_its_own_words(tmp_path):
    with pytest.raises(FailedRun, match="or choose another with db=") as raised:
        evoattn.load(db=tmp_path / "none.sqlite")
    assert "--" not in str(raised.value)


def test_what_a_shape_is_made_of_fits_into_some_lines():
    """With every key of the help."""
    said = run("search", "--gpu", "l4", "--shape", "B=1,foo=3").stderr
    assert len(said) < 6 * WIDTH
    keys = re.findall(r"(\w+)=", SHAPE_HELP)
    assert len(keys) > 15 and all(re.search(rf"\b{key}\b", said) for key in keys)


def test_the_help_of_search_shows_the_whole_syntax_of_a_shape_at_80_columns():
    lines = run("search", "--help").stdout.splitlines()
    assert all(len(line) <= WIDTH for line in lines)
    shown = " ".join(" ".join(lines).split())
    assert SHAPE_HELP in shown
    for part in ("B=1,H=16,S=1024,D=64,mask=causal", "mask=full|causal|causal_lower_right", "dtype=fp16|bf16|fp32"):
        assert part in SHAPE_HELP and any(part in line for line in lines), part


@pytest.mark.parametrize("command", ["", "search", "report", "try", "families", "export"])
def test_no_help_is_wider_than_the_terminal_or_cut_off(command):
    usage, *lines = run(*command.split(), "--help").stdout.splitlines()
    assert (
        usage.startswith("Usage: evoattn")
        and lines
        and all(len(line) <= WIDTH and "…" not in line and not line.endswith("...") for line in lines)
        and "default: (" not in " ".join(map(str.strip, lines))
    )


def test_version_and_completion():
    assert run("--version").stdout == f"evoattn {__version__}\n"
    assert "--install-completion" in run("--help").stdout
    assert "Commands:" in run().output and run().exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evoattn.evaluation", "typer", "evoattn.cli.search", "evoattn.search.request"])
@pytest.mark.sampled(2)
def test_ctrl_c_while_a_command_still_imports_is_one_sentence(name):
    done = search_without((name,), "KeyboardInterrupt", "from evoattn.cli.entry import main\nmain()")
    assert (done.returncode, done.stderr) == (1, "evoattn: Interrupted.\n")


def test_a_narrow_terminal_cuts_nothing_off():
    shown = CliRunner().invoke(app, ["gpus"], env={"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "40"}).output
    assert "…" not in shown and "no CUDA" not in shown


def test_ctrl_c_between_the_words_and_the_command_is_not_an_exit_without_a_sentence():
    other = typer.Typer(cls=type(typer.main.get_command(app)))

    @other.callback()
    def root() -> None: ...

    @other.command()
    def wait() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        other(["wait"])


def test_the_variants_in_the_help_of_a_shape_are_understood_and_all():
    words = SHAPE_HELP.partition("Variants: ")[2].rstrip(".").split(", ")
    used = dict.fromkeys(("page", "appended"), "seqused=16:96,")
    also = used | dict.fromkeys(("shared_kv", "rotary_apart"), "Dv=32,Hkv=1,")
    shapes = [f"B=1,H=2,S=96,D=64,{also.get(word.partition('=')[0], '')}{word}" for word in words]
    assert {name for shape in shapes for name in parse_shape(shape).variants} == set(VARIANTS)


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "CUDA_VISIBLE_DEVICES": ""}


def is_of_text(call: ast.Call) -> bool:
    """Whether a call of a method reads or writes a text file."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "read_text":
        return not call.args  # a distribution's `read_text` takes a name
    modes = [word.value for word in call.args[:1] if isinstance(word, ast.Constant)]
    return call.func.attr == "write_text" or (call.func.attr == "open" and modes in (["r"], ["w"], ["a"]))


@cache
def calls_of_text() -> list[tuple[str, ast.Call]]:
    """(file, call) of all of the package."""
    return [
        (str(path.relative_to(ROOT / "evoattn")), call)
        for path in (ROOT / "evoattn").rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and is_of_text(call)
    ]


@pytest.mark.slow
def test_text_files_are_read_and_written_as_utf_8():
    calls = calls_of_text()
    assert len(calls) > 20
    assert not [(name, call.lineno) for name, call in calls if not any(k.arg == "encoding" for k in call.keywords)]


@pytest.mark.slow
def test_files_of_a_user_are_written_whole():
    """By `write_file`, so that a full disk costs no file that was there."""
    written = {name for name, call in calls_of_text() if ast.unparse(call.func).endswith(".write_text")}
    assert "model/whole_file.py" in written
    assert not {name for name in written if name.split("/")[0] in ("cli", "ops", "export", "report", "bench")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("families",),
        pytest.param(("try", "flash_scalar", "BLOCK_M=7", "--gpu", "l4", "--source"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.sampled(2)
def test_a_locale_without_the_letters_is_no_error(words):
    done = subprocess.run(
        [sys.executable, "-c", "from evoattn.cli.entry import main; main()", *words],
        env=os.environ | ASCII,
        capture_output=True,
        timeout=600,
    )
    assert b"Traceback" not in done.stderr and done.returncode in (0, 2)
    assert done.stdout.decode("ascii")


@pytest.mark.parametrize(
    "ending, code, said",
    [
        ("--help >/dev/full", 1, "evoattn: No space left on device.\n"),
        ("families >/dev/full", 1, "evoattn: No space left on device.\n"),
        ("families >&-", 0, ""),
        ("report --db /none 2>&-", 1, ""),
    ],
)
@pytest.mark.slow
def test_an_output_that_takes_nothing_costs_no_traceback(ending, code, said):
    done = subprocess.run(
        ["sh", "-c", f"'{sys.executable}' -m evoattn {ending}"], capture_output=True, text=True, timeout=600
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)
