"""How long the first call of a process takes, without and with compiled kernels on the disk."""

import json
import os
import subprocess
import sys

from evoattn.model.paths import ROOT
from tests.ops.gpu.gpu_problems import ON_A_GPU

pytestmark = ON_A_GPU
SHAPE = "B=1,H=16,S=1024,D=128,dtype=bf16,mask=causal_upper_left"


def test_first_calls(tmp_path):
    made = tmp_path / "made.json"
    words = [sys.executable, "-m", "benchmarks.calls.first_call", SHAPE, "--estimated", "--no-imports", "--json", made]
    for attempt in range(2):  # others may be at work on the host
        subprocess.run(words, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
        empty, filled, alone = json.loads(made.read_text())["rows"]
        within = empty["first call"] < 8000 and filled["first call"] < 200 and alone["first call"] < 400  # ms
        if within or attempt:  # aimed at are 3 s, as NVRTC, CuPy's import and the check take their time, and 50 ms
            break
    assert within and filled["cubin"] < 50 and alone["cubin"] < 50, (empty, filled, alone)  # nothing is compiled
