"""How long first calls of `evoattn.flex_attention` take, and what compiles: of a new expression, and of one that the
cache of kernels knows.

    python -m benchmarks.flex.first_call [FUNCTION …] [--gradients] [--no-device GPU] [--json FILE]

Each function of `benchmarks/flex/mods.py` has two processes, the first with an empty cache, the second with the cache
that the first has left. CUDA and PyTorch's own attention have run in both before. A row is a call with its block mask
by `evoattn.create_block_mask`: milliseconds until the device is done, those of the mask alone, parts of the call, and
how many kernels were compiled. After the first call come ones of new functions of the same kind, as a training step
makes them, and of other lengths.

With `--no-device h100` no GPU is needed: CPU time of all that is not CUDA's, and PyTorch makes the block masks."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.calls.first_call import CACHE, Stopwatch, platform_of, right_without_a_device

FUNCTIONS = ("causal_documents", "alibi_by_slopes", "causal_softcap_in_window", "neighbours_2d", "relative_bias")
LENGTHS = {"first": 2048, "new functions": 2048, "another length": 3000, "longer": 8192, "shorter": 512}
CACHES = "empty", "filled"
SUFFIX = ".kernel"
"""Of a compiled kernel's file."""


def one_process(name: str, folder: Path, gradients: bool, no_device: str) -> list[dict[str, Any]]:
    """A row of each call of this process."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    from benchmarks.flex.mods import MODS, Shape

    device = "cpu" if no_device else "cuda"
    ready = torch.zeros(1, 1, 16, 64, dtype=torch.bfloat16, device=device)
    torch.nn.functional.scaled_dot_product_attention(ready, ready, ready)
    seconds = time.process_time if no_device else time.perf_counter

    def wait() -> None:
        if not no_device:
            torch.cuda.synchronize()

    wait()
    begun = seconds()
    import evoattn
    from evoattn.backends.cubins import get_cubin
    from evoattn.ops import mods
    from evoattn.ops.runtime import Runtime, current

    evoattn.flex_attention, evoattn.create_block_mask  # noqa: B018 - what they import counts as an import
    watch = Stopwatch(seconds)
    imports = (seconds() - begun) * 1e3
    build = right_without_a_device if no_device else get_cubin
    runtime = Runtime(
        platform_of(no_device), watch.around("pick", current.best_known), folder, build=watch.around("code", build)
    )
    runtime.estimated = bool(no_device)
    runtime.prepare = watch.around("check, load", runtime.prepare)  # type: ignore[method-assign]
    mods.trace = watch.around("trace", mods.trace)
    rows = []
    with current.use(runtime):
        for kind, length in LENGTHS.items():
            shape = Shape(2, 16, length, length, device)
            q, k, v = (torch.randn(2, 16, length, 128, device=device).bfloat16() for _ in range(3))
            written = MODS[name](shape)
            by = shape.batch if written.by_batch else None, shape.heads if written.by_head else None
            wait()
            watch.ms.clear()
            before, began = compiled(folder), seconds()
            mask = None
            if written.mask_mod is not None:
                make = create_block_mask if no_device else evoattn.create_block_mask
                mask = make(written.mask_mod, *by, length, length, device)
            wait()
            of_mask = (seconds() - began) * 1e3
            for one in (q, k, v):
                one.requires_grad_(gradients)
            out = evoattn.flex_attention(q, k, v, score_mod=written.score_mod, block_mask=mask)
            if gradients:
                out.backward(out.detach())
            wait()
            row = {"call": kind, "length": length, "ms": (seconds() - began) * 1e3, "mask ms": of_mask}
            rows.append(row | watch.ms | {"imports ms": imports, "compiled": compiled(folder) - before})
    return rows


def compiled(folder: Path) -> int:
    """The kernels that lie in the caches, those of masks too."""
    return sum(1 for path in folder.parent.rglob("*") if path.suffix == SUFFIX)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("functions", nargs="*", default=FUNCTIONS)
    parser.add_argument("--gradients", action="store_true", help="the backward pass, too")
    parser.add_argument("--no-device", metavar="GPU", default="", help="CPU time with a device that does nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.folder:
        print(json.dumps(one_process(words.functions[0], words.folder, words.gradients, words.no_device)))
        return
    rows = []
    for name in words.functions:
        with tempfile.TemporaryDirectory() as folder:
            for cache in CACHES:
                command = [sys.executable, "-m", "benchmarks.flex.first_call", name, "--folder", f"{folder}/op"]
                command += ["--gradients"] * words.gradients + ["--no-device", words.no_device] * bool(words.no_device)
                found = subprocess.check_output(command, text=True, env=os.environ | {CACHE: folder})
                for row in json.loads(found.splitlines()[-1]):
                    rows.append({"function": name, "cache": cache} | row)
                    said = (
                        f"{key} {one:.1f}" if isinstance(one, float) else f"{key} {one}" for key, one in row.items()
                    )
                    print(f"{name}, cache {cache}: {', '.join(said)}", flush=True)
    if words.json:
        words.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
