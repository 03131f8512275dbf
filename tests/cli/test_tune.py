"""`evoattn tune`: one sentence for what cannot be; what it does is tested in tests/ops/test_tune.py."""

import pytest
from typer.testing import CliRunner

from evoattn.cli.main import app
from evoattn.model.gpu import detect_devices
from evoattn.ops.shapes import Shapes


def run(*words):
    return CliRunner().invoke(app, ["tune", *map(str, words)])


def test_a_file_that_cannot_be_read(tmp_path):
    done = run(tmp_path / "nothing.json")
    assert done.exit_code == 2
    assert "cannot be read" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_of_something_else(tmp_path):
    (tmp_path / "list.json").write_text("[]")
    done = run(tmp_path / "list.json")
    assert done.exit_code == 2
    assert "has no `shapes`" in done.stderr


def test_a_wrong_budget(tmp_path):
    Shapes().save(tmp_path / "SHAPES.json")
    done = run(tmp_path / "SHAPES.json", "--budget", "5trials")
    assert done.exit_code == 2
    assert "tune takes a time" in done.stderr


@pytest.mark.skipif(bool(detect_devices()), reason="there is a CUDA device")
def test_without_a_device(tmp_path):
    Shapes().save(tmp_path / "SHAPES.json")
    done = run(tmp_path / "SHAPES.json")
    assert done.exit_code == 1
    assert "no CUDA device" in done.stderr
