"""`scripts/interpreter_witness.py`: a config of each family, as the command runs hundreds."""

import subprocess
import sys

from evoattn.families.registry import FAMILIES
from evoattn.paths import TEMPLATES


def test_a_few_configs_raise_no_alarm():
    script = TEMPLATES.parent / "scripts" / "interpreter_witness.py"
    command = [sys.executable, str(script), str(len(FAMILIES)), "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=script.parents[1])
    assert done.returncode == 0 and f"0 false alarms in {len(FAMILIES)} configs" in done.stdout, done.stdout + done.stderr
