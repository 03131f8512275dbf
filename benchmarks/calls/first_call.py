"""Where the time of the first call of `evoattn.attention` in a process goes, without and with compiled kernels on disk.

    python -m benchmarks.calls.first_call [SHAPE …] [--json FILE] [--estimated] [--no-imports] [--no-device GPU]

Each row is a process of its own: CUDA and PyTorch's own attention have run in it before. The first row of a shape has
an empty cache of kernels, the second the cache that the first has left, the third the same without what picks came to.
Milliseconds; what is not named is "else".
Also the seconds that `import torch` and, after it, `import evoattn; evoattn.attention` take.

With `--no-device h100` no GPU is needed: the CPU time of all that is not CUDA's, for kernels of that GPU."""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

SHAPES = [
    "B=1,H=16,S=1024,D=128,dtype=bf16,mask=causal_upper_left",
    "B=1,H=32,Hkv=8,Sq=1,Sk=2048,D=128,dtype=bf16,mask=full",
]
CACHES = "empty", "filled", "kernels alone"
COLLECTIONS = "garbage collection"
CACHE = "EVOATTN_CACHE"
IMPORTS = """
import time
started = time.perf_counter()
import torch
torch_seconds = time.perf_counter() - started
started = time.perf_counter()
import evoattn
evoattn.attention
print(torch_seconds, time.perf_counter() - started)
"""


class Stopwatch:
    """Milliseconds by name; what is timed inside of something timed counts for the inner name only."""

    def __init__(self, seconds: Callable[[], float] = time.perf_counter) -> None:
        self.ms: dict[str, float] = {}
        self.seconds, self._inner, self._collecting = seconds, 0.0, 0.0

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            outer, self._inner, started = self._inner, 0.0, self.seconds()
            try:
                return function(*arguments, **named)
            finally:
                took = (self.seconds() - started) * 1e3
                self.ms[name] = self.ms.get(name, 0.0) + took - self._inner
                self._inner = outer + took

        return timed

    def collection(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        """For `gc.callbacks`: collections count for themselves. One of all objects takes 0.1 s, at any allocation."""
        if phase == "start":
            self._collecting = self.seconds()
        else:
            took = (self.seconds() - self._collecting) * 1e3
            self.ms[COLLECTIONS] = self.ms.get(COLLECTIONS, 0.0) + took
            self._inner += took


def one_process(shape: str, folder: Path, estimated: bool, no_device: str) -> dict[str, float]:
    """Times of the first and the second call in this process."""
    import torch

    from evoattn.correctness.reference import make_inputs
    from evoattn.model.shape_text import by_name_or_shape

    problem = by_name_or_shape(shape)
    tensors = make_inputs(problem, 1, "cpu" if no_device else "cuda")
    wait: Callable[[], None] = (lambda: None) if no_device else torch.cuda.synchronize
    q, k, v = (tensors[name] for name in "qkv")
    causal, grouped = problem.mask != "full", problem.kv_heads != problem.heads
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    wait()
    watch = Stopwatch(time.process_time if no_device else time.perf_counter)
    started = watch.seconds()

    def first() -> None:
        from evoattn.backends.cubins import get_cubin
        from evoattn.ops.attention import attention
        from evoattn.ops.runtime import Runtime, current

        platform = watch.around("libcuda", platform_of)(no_device)
        for name in ("spec", "identity", "load", "function", "allow_shared_memory", "encode_map", "launch"):
            setattr(platform, name, watch.around(f"{name} (device)", getattr(platform, name)))
        pick, build = (
            watch.around("pick", current.best_known),
            watch.around("cubin", right_without_a_device if no_device else get_cubin),
        )
        runtime = Runtime(platform, pick, folder, build=build)
        runtime.estimated = estimated
        runtime.choice = watch.around("problem and checks", runtime.choice)  # type: ignore[method-assign]
        runtime.prepare = watch.around("proof and binding", runtime.prepare)  # type: ignore[method-assign]
        watch.ms["imports"] = (watch.seconds() - started) * 1e3 - sum(watch.ms.values())
        with current.use(runtime):
            gc.callbacks.append(watch.collection)
            for name in ("first call", "second call"):
                begun = watch.seconds()
                attention(q, k, v, is_causal=causal, enable_gqa=grouped, strict=True)
                wait()
                watch.ms[name] = (watch.seconds() - begun) * 1e3
            gc.callbacks.remove(watch.collection)

    with torch.no_grad():
        first()
    parts = {name: ms for name, ms in watch.ms.items() if name not in ("first call", "second call", "imports")}
    del parts["libcuda"]
    parts["else"] = watch.ms["first call"] - sum(parts.values())
    whole = {name: watch.ms[name] for name in ("first call", "second call", "imports", "libcuda")}
    return whole | dict(sorted(parts.items(), key=lambda pair: -pair[1]))


def platform_of(no_device: str) -> Any:
    """CUDA's, or that of a device that does nothing."""
    if no_device:
        from benchmarks.calls.no_device import NoDevice

        return NoDevice(no_device)
    from evoattn.backends.platform import CudaPlatform

    return CudaPlatform()


def right_without_a_device(*arguments: Any) -> Any:
    """A cubin whose check is recorded as passed, as nothing can be checked without a device."""
    from benchmarks.calls.no_device import NoDevice
    from evoattn.backends.cubins import get_cubin
    from evoattn.ops.check import record_check, recorded_check

    *_, config, gpu, folder = arguments
    cubin, machine = get_cubin(*arguments), NoDevice(gpu.name).identity(0)
    if recorded_check(cubin, machine, folder) is None:
        record_check(cubin, machine, folder, config, "")
    return cubin


def import_seconds() -> tuple[float, float]:
    """Of torch, and of the op after it: the least of three processes."""
    runs = [subprocess.check_output([sys.executable, "-c", IMPORTS], text=True).split() for _ in range(3)]
    return min(float(a) for a, _ in runs), min(float(b) for _, b in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=SHAPES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--estimated", action="store_true", help="also kernels that were measured on no GPU like this")
    parser.add_argument("--no-imports", action="store_true", help="leave out the time of the imports, three processes")
    parser.add_argument("--no-device", metavar="GPU", default="", help="CPU time with a device that does nothing")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        print(json.dumps(one_process(arguments.shapes[0], arguments.folder, arguments.estimated, arguments.no_device)))
        return
    from evoattn.portfolio.climb import SUFFIX  # here: the processes that are timed import it when it is needed

    imports: list[float] = []
    if not arguments.no_imports:
        imports += import_seconds()
        print("import torch {:.2f} s, then evoattn.attention {:.3f} s".format(*imports))
    rows = []
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as folder:
            for cache in CACHES:
                for kept in Path(folder).rglob(f"*{SUFFIX}") if cache == CACHES[2] else ():
                    kept.unlink()
                command = [sys.executable, __file__, shape, "--folder", folder]
                command += ["--estimated"] if arguments.estimated else []
                command += ["--no-device", arguments.no_device] if arguments.no_device else []
                row = json.loads(
                    subprocess.check_output(command, text=True, env=os.environ | {CACHE: folder}).splitlines()[-1]
                )
                rows.append({"shape": shape, "cache": cache} | row)
                print(f"{shape}, cache {cache}: " + ", ".join(f"{name} {ms:.2f}" for name, ms in row.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"import_s": imports, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
