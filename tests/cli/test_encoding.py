"""Texts are UTF-8 whatever the locale says, and the command line answers where the locale knows ASCII alone."""

import ast
import os
import subprocess
import sys
from functools import cache

import pytest

from evoattn.model.paths import ROOT

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
