"""An operation and a family from outside go the whole line: searched offline, reported, shown, reproduced, exported.

The exported program runs on the host, with `host/cuda_runtime.h` in place of the CUDA runtime."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT, HOST = Path(__file__).parents[2], Path(__file__).parent / "host"
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
def test_an_operation_from_outside_goes_the_whole_line(command, tmp_path):
    words = ("--gpu", "l4", "--offline", "--budget", "3trials", "--jobs", "1", "--no-keep")
    assert "Best kernel: trial" in command("search", "--shape", SHAPE, *words)
    report = command("report")
    assert "merge_two" in report and "physics alone orders its kernels" in report
    shown = command("show", "best")
    assert "Right on the interpreter" in shown and "parts without keys: error" in shown
    assert command("reproduce", "best").endswith("reproduced")
    exported = tmp_path / "merge.cu"
    command("export", "best", "-o", str(exported))
    source = exported.read_text()
    for name, text in (("right", source), ("wrong", source.replace("most + __logf(sum)", "most"))):
        (tmp_path / f"{name}.cpp").write_text(text)
        build = ["g++", "-std=c++17", "-Wall", "-Werror", f"-isystem{HOST}", f"{name}.cpp", "-o", name]
        subprocess.run(build, cwd=tmp_path, check=True)
        said = subprocess.run([tmp_path / name], capture_output=True, text=True)
        assert (said.returncode == 0) == (name == "right") and said.stdout.rstrip().endswith(name.upper()), said.stdout
        assert said.stdout.count("ok   ") == (4 if name == "right" else 2), said.stdout
