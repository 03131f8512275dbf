"""The quick part of `tests/faults`: two kills at random moments and a short day; the whole of it takes
minutes."""

import subprocess
import sys

import pytest

from evoattn.model.paths import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.sampled(0)
def test_a_killed_search_and_a_long_one_keep_what_they_promised():
    words = ["--only", "kill,day", "--kills", "2", "--trials", "1500", "--fake"]
    done = subprocess.run([sys.executable, "-m", "tests.faults", *words], capture_output=True, text=True, cwd=ROOT)
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    assert done.returncode == 0 and rows == [["kill", "ok"], ["day", "ok"]], done.stdout + done.stderr
