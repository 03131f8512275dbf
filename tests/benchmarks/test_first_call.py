"""`benchmarks/calls/first_call.py` on a machine without a GPU."""

import json
import subprocess
import sys

import pytest

SHAPE = "B=1,H=4,S=256,D=64,dtype=fp16,mask=full"


@pytest.mark.slow
@pytest.mark.sampled(0)
def test_the_first_call_is_split_without_a_device(tmp_path):
    made = tmp_path / "times.json"
    words = [SHAPE, "--no-device", "h100", "--no-imports", "--json", made]
    subprocess.run([sys.executable, "-m", "benchmarks.calls.first_call", *words], check=True, capture_output=True)
    empty, filled, alone = json.loads(made.read_text())["rows"]
    assert [row["cache"] for row in (empty, filled, alone)] == ["empty", "filled", "kernels alone"]
    assert max(filled["cubin"], alone["cubin"]) < empty["cubin"] / 4, "what was compiled is found again"
    assert filled["pick"] < alone["pick"] / 2, "and what the pick came to"
    for row in (empty, filled, alone):
        parts = sum(ms for name, ms in row.items() if name in ("pick", "cubin", "proof and binding"))
        assert 0 < row["second call"] < parts <= row["first call"]
