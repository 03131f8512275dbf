"""An operation and a family from outside go the whole line: searched offline, reported, shown, reproduced."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = "import tests.operation.registered; from evoattn.cli.main import main; main()"
SHAPE = "B=1 H=2 S=50 D=16 fp32 op=merge_two"


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merge")

    def run(*words, code=0):
        program = [sys.executable, "-c", COMMAND, *words, "--db", str(folder / "merge.db")]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stderr
        return " ".join((done.stdout + done.stderr).split())

    return run


@pytest.mark.slow
def test_an_operation_from_outside_goes_the_whole_line(command):
    words = ("--gpu", "l4", "--offline", "--budget", "3trials", "--jobs", "1", "--no-keep")
    assert "Best kernel: trial" in command("search", "--shape", SHAPE, *words)
    report = command("report")
    assert "merge_two" in report and "physics alone orders its kernels" in report
    shown = command("show", "best")
    assert "Right on the interpreter" in shown and "parts without keys: error" in shown
    assert command("reproduce", "best").endswith("reproduced")
    assert "Exports are of the forward pass so far, not of op=merge_two" in command("export", "best", code=1)
