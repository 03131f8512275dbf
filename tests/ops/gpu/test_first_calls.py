"""How long the first call of a process takes, without and with compiled kernels on the disk."""

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from gpu_problems import ON_A_GPU

pytestmark = ON_A_GPU


def first_call(folder: Path) -> dict[str, float]:
    """Seconds of the first and the second call, device time included, in a process of its own."""
    code = f"""
        import sys, time, json
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from pathlib import Path
        import torch
        from stand_in import stand_in
        from evoattn.ops import current
        from evoattn.ops.attention import attention
        from evoattn.ops.platform import CudaPlatform
        from evoattn.ops.runtime import Runtime
        q = torch.randn(1, 16, 1024, 128, device="cuda", dtype=torch.bfloat16)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        torch.cuda.synchronize()
        times = []
        with current.use(Runtime(CudaPlatform(), stand_in, Path({str(folder)!r}))):
            for _ in range(2):
                started = time.perf_counter()
                attention(q, q, q, is_causal=True, strict=True)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - started)
        print(json.dumps(dict(first=times[0], second=times[1], cupy="cupy" in sys.modules)))
    """
    said = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True)
    return json.loads(said.splitlines()[-1])


def test_first_calls(tmp_path):
    started = time.perf_counter()
    cold, warm = first_call(tmp_path), first_call(tmp_path)
    print(f"first process {cold}, second process {warm}, both in {time.perf_counter() - started:.1f} s")
    assert cold["first"] < 8  # NVRTC, CuPy's import and the check; 3 s are aimed at
    assert warm["first"] < 0.5  # 50 ms are aimed at, 0.21 s were measured on a rented H100
    assert not warm["cupy"]
