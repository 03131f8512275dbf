"""What the tests of the command line share: a command run on a machine without a GPU, and what a refusal looks like."""

from typing import Any

from typer.testing import CliRunner

from evoattn.cli.main import app

WIDTH = 80
SHAPE = "B=1,H=2,S=96,D=32"


def run(*words: object) -> Any:
    """A command on a terminal of 80 columns, with the CUDA devices hidden."""
    return CliRunner().invoke(app, [str(w) for w in words], env={"CUDA_VISIBLE_DEVICES": "", "COLUMNS": str(WIDTH)})


def refused(result: Any, code: int, *words: str) -> None:
    """One sentence on stderr, no traceback, the exit code of the contract."""
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("evoattn: "), result.stderr
    for word in words:
        assert word in lines[0]
