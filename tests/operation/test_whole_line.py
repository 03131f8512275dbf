"""An operation and a family from outside go the whole line: searched offline, reported, shown, reproduced, exported.

The exported program runs on the host, with `host/cuda_runtime.h` in place of the CUDA runtime."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT, HOST = Path(__file__).parents[2], Path(__file__).parent / "host"
COMMANDS = """
import json, sys
import tests.operation.registered
from typer.testing import CliRunner
from evoattn.cli.main import app
print(json.dumps([CliRunner().invoke(app, words).output for words in json.loads(sys.argv[1])]))
"""
SHAPE = "B=1 H=2 S=50 D=16 fp32 op=merge_two"


@pytest.mark.slow
def test_an_operation_from_outside_goes_the_whole_line(tmp_path):
    exported, place = tmp_path / "merge.cu", ("--db", str(tmp_path / "merge.db"))
    words = ("--gpu", "l4", "--offline", "--budget", "3trials", "--jobs", "1", "--no-keep")
    commands = [("search", "--shape", SHAPE, *words), ("report",), ("show", "best"), ("reproduce", "best")]
    commands.append(("export", "best", "-o", str(exported)))
    given = json.dumps([(*words, *place) for words in commands])
    program = [sys.executable, "-c", COMMANDS, given]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    searched, report, shown, reproduced, _ = (" ".join(said.split()) for said in json.loads(done.stdout))
    assert "Best kernel: trial" in searched, searched
    assert "merge_two" in report and "physics alone orders its kernels" in report
    assert "Right on the interpreter" in shown and "parts without keys: error" in shown
    assert reproduced.endswith("reproduced")
    source = exported.read_text()
    for name, text in (("right", source), ("wrong", source.replace("most + __logf(sum)", "most"))):
        (tmp_path / f"{name}.cpp").write_text(text)
        build = ["g++", "-std=c++17", "-Wall", "-Werror", f"-isystem{HOST}", f"{name}.cpp", "-o", name]
        subprocess.run(build, cwd=tmp_path, check=True)
        said = subprocess.run([tmp_path / name], capture_output=True, text=True)
        assert (said.returncode == 0) == (name == "right") and said.stdout.rstrip().endswith(name.upper()), said.stdout
        assert said.stdout.count("ok   ") == (6 if name == "right" else 4), said.stdout
