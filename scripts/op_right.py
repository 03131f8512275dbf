"""Is `evoattn.attention` right for any call? Draws calls over all arguments and judges each answer.

    python scripts/op_right.py [--count 300] [--seed 200] [--jobs 16] [--seconds 90] [--json FILE] [--only N]

Of each call: two runs, the same bit for bit, over memory that was poisoned with NaN before; inputs unchanged; nothing
written beside a given `out`; the answer and the log-sum-exp against the formula in float64 by flash-attention's rule.
Where no kernel runs, the reason is counted and PyTorch's answer is judged, too. `--jobs` processes compile kernels
ahead. Exit code 1 if anything is wrong. Without a GPU PyTorch answers all calls.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from op_calls.ahead import compiled_ahead
from op_calls.calls import drawn
from op_calls.judged import Judged, judged

from evoattn.model.gpu import detect_devices
from evoattn.ops import current
from evoattn.ops.platform import CudaPlatform
from evoattn.ops.runtime import Runtime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile ahead")
    parser.add_argument("--seconds", type=float, default=0, help="ends after so long, whatever the count; 0 for never")
    parser.add_argument("--most-flops", type=float, default=1e11, help="of a call")
    parser.add_argument(
        "--measured-only", action="store_true", help="no kernels that were measured on no GPU like this"
    )
    parser.add_argument("--only", type=int, help="one call, by its number")
    parser.add_argument("--folder", type=Path, help="of compiled kernels; a new one unless given")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    started = time.monotonic()
    calls = list(enumerate(drawn(words.seed, words.count, words.most_flops)))
    calls = calls if words.only is None else [calls[words.only]]
    devices = detect_devices()
    rows: list[Judged] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = words.folder or Path(temporary)
        platform = None
        ready = iter(calls)
        if devices and devices[0].spec:
            ready = compiled_ahead(calls, words.jobs, devices[0].spec, folder, not words.measured_only)
            platform = CudaPlatform()
        runtime = Runtime(platform, current.best_known, folder)
        runtime.estimated = not words.measured_only
        with current.use(runtime), torch.no_grad():
            for number, call in ready:
                rows.append(judged(number, call, "cuda" if platform else "cpu"))
                if rows[-1].wrong:
                    print(f"{number}: {rows[-1].wrong}: {call.describe()}; {rows[-1].ran}", flush=True)
                if rows[-1].wrong and platform and is_broken():
                    print("The device can no longer be used; the calls after this one were not run.")
                    break
                if words.seconds and time.monotonic() - started > words.seconds:
                    break
    print(summary(rows, time.monotonic() - started))
    if words.json:
        words.json.write_text("".join(json.dumps(row.__dict__) + "\n" for row in rows))
    return int(any(row.wrong for row in rows))


def is_broken() -> bool:
    """Whether a kernel has left the device unusable for this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def summary(rows: list[Judged], seconds: float) -> str:
    """How many calls ran as what."""
    kernels = [row for row in rows if row.kernel]
    lines = [f"{len(rows)} calls in {seconds:.0f} s, {sum(bool(row.wrong) for row in rows)} wrong; by kernels: "]
    lines[0] += f"{len(kernels)}, {len({row.ran for row in kernels})} kinds of them"
    if kernels:
        worst = max(row.error for row in kernels)
        lines.append(f"  the largest error of a kernel is {worst:.2f} of what is allowed")
    for family, count in Counter(row.ran.split()[0] for row in kernels).most_common():
        lines.append(f"{count:6d}  {family}")
    for reason, count in Counter(row.ran for row in rows if not row.kernel).most_common():
        lines.append(f"{count:6d}  PyTorch: {reason}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
