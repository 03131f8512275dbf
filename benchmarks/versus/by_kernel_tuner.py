"""Kernel Tuner on the sources of flash_mma, through its CuPy backend.

    python -m benchmarks.versus.by_kernel_tuner PROBLEM --seconds 60 -o FOUND.json            its genetic algorithm
    python -m benchmarks.versus.by_kernel_tuner PROBLEM --given EVOATTN.json -o FOUND.json   the very configs of evoattn

Three things that it does not do are done for it, as it would fail otherwise: the limit of dynamic shared memory is
raised for each kernel, a wrong answer is counted rather than ends the tuning, and a GPU's UUID may hold zero bytes.
Answers are compared on the device, or with `--answers host` as its manual shows, by `numpy.allclose`. Needs
`kernel-tuner` (1.5.0 was used) and a CUDA device.
"""

from __future__ import annotations

import time

STARTED = time.time()

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.versus import found, kernel_tuner_space
from benchmarks.versus.found import Found, Tried
from benchmarks.versus.kernel_tuner_space import THREADS, params_of, restrictions, tune_params
from evoattn.backends.kernel_files import OPTIONS
from evoattn.correctness.cases import make_case
from evoattn.correctness.judge import judge_one
from evoattn.families import registry
from evoattn.families.render import render
from evoattn.model.gpu import GpuSpec, detect_devices
from evoattn.model.launch import Buffer, KernelLaunch, Scalar
from evoattn.model.named_problems import by_name_or_shape
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

FAMILY = registry.lookup(kernel_tuner_space.FAMILY)
COMPILER_OPTIONS = [option for option in OPTIONS if option.startswith(("--std", "-default"))]
GIVEN = "given"
"""The tunable parameter of `--given`: an index into a list of configs."""


class Bench:
    """One problem's kernels as Kernel Tuner asks for them: source, grid, shared memory and arguments of a config."""

    def __init__(self, problem: AttentionProblem, gpu: GpuSpec, params: Callable[[dict[str, Any]], dict[str, Any]]):
        """`params`: the family's own parameters out of Kernel Tuner's."""
        self.problem, self.gpu, self._params = problem, gpu, params

    def config(self, chosen: dict[str, Any]) -> KernelConfig:
        return KernelConfig(FAMILY.name, self._params(chosen))

    def launch(self, chosen: dict[str, Any]) -> KernelLaunch:
        """flash_mma has one launch."""
        (launch,) = FAMILY.launches(self.problem, self.config(chosen), self.gpu)
        return launch

    def source(self, chosen: dict[str, Any]) -> str:
        return render(FAMILY, self.problem, self.config(chosen), self.gpu).source

    def arguments(self, chosen: dict[str, Any], buffers: dict[str, Any]) -> list[Any]:
        """Of any config: they do not differ. `buffers` are arrays by name."""
        found: list[Any] = []
        for argument in self.launch(chosen).args:
            if isinstance(argument, Buffer):
                found.append(buffers[argument.name])
            else:
                assert isinstance(argument, Scalar), "flash_mma takes no tensor maps"
                found.append(np.dtype(argument.ctype).type(argument.value))
        return found


def as_array(tensor: torch.Tensor, host: bool) -> Any:
    """The memory of a contiguous tensor as Kernel Tuner takes it. NumPy has no bf16: its bits as integers."""
    flat = tensor.reshape(-1)
    flat = flat.view(torch.int16) if flat.dtype is torch.bfloat16 else flat
    if host:
        return flat.cpu().numpy()
    import cupy

    return cupy.asarray(flat)


def with_whole_uuids(runtime: Any) -> None:
    """Let CuPy's runtime give UUIDs of 16 bytes, as Kernel Tuner takes them: it cuts them at the first zero byte, which
    some GPUs have."""
    ask = runtime.getDeviceProperties

    def properties(device: int) -> dict[str, Any]:
        found: dict[str, Any] = ask(device)
        return found | {"uuid": found["uuid"].ljust(16, b"\0")}

    runtime.getDeviceProperties = properties


def tune(
    bench: Bench,
    space: dict[str, list[Any]],
    limits: list[str],
    seconds: float | None,
    host: bool,
    seed: int,
    device: str = "cuda",
) -> list[dict[str, Any]]:
    """Kernel Tuner's results. `seconds` None: every config of the space, else its genetic algorithm for so long."""
    import cupy
    import kernel_tuner
    from kernel_tuner.observers import BenchmarkObserver

    with_whole_uuids(cupy.cuda.runtime)

    class Device(BenchmarkObserver):  # type: ignore[misc]  # it has no types
        """Gives the backend away."""

        def get_results(self) -> dict[str, Any]:
            return {}

    observer, problem = Device(), bench.problem
    case = make_case("own", problem, int(STARTED), device)
    o = torch.zeros(problem.shape("o"), dtype=case.tensors["q"].dtype, device=device)
    buffers = {name: as_array(tensor, host) for name, tensor in (case.tensors | {"o": o}).items()}
    first = {name: values[0] for name, values in space.items()}
    arguments = bench.arguments(first, buffers)
    wrong: list[str] = []

    def smem(chosen: dict[str, Any]) -> int:
        size = bench.launch(chosen).smem_bytes
        observer.dev.func.max_dynamic_shared_size_bytes = size
        o.fill_(float("nan"))  # so that a kernel that writes nothing does not find the last one's answer
        return size

    def verify(answer: list[Any] | None, result: list[Any], atol: float) -> bool:
        if answer:
            (expected,), (given,) = ([a for a in arrays if a is not None] for arrays in (answer, result))
            right = bool(np.allclose(expected, given, atol=atol))
        else:
            right = not judge_one(o, case.answer["o"])[0]
        if not right:
            wrong.append("")
        return True

    answer = [as_array(case.answer["o"].values.to(o.dtype), True) if a is buffers["o"] else None for a in arguments]
    results, _ = kernel_tuner.tune_kernel(
        FAMILY.name,
        bench.source,
        lambda chosen: bench.launch(chosen).grid,
        arguments,
        space,
        grid_div_x=1,
        grid_div_y=1,
        grid_div_z=1,
        restrictions=limits or None,
        answer=answer if host else None,
        verify=verify,
        atol=float(case.answer["o"].allowed_error),
        lang="CUPY",
        smem_args={"size": smem},
        compiler_options=COMPILER_OPTIONS,
        defines={},
        block_size_names=[THREADS, "NO_Y", "NO_Z"],
        observers=[observer],
        strategy="brute_force" if seconds is None else "genetic_algorithm",
        strategy_options={} if seconds is None else {"time_limit": seconds},
        quiet=True,
        seed=seed,
    )
    print(f"{len(results)} configs, {len(wrong)} answers counted as wrong", file=sys.stderr)
    return list(results)


def tried(bench: Bench, result: dict[str, Any]) -> Tried:
    """One of Kernel Tuner's results. Its times are in ms."""
    at = datetime.fromisoformat(result["timestamp"]).timestamp() - STARTED
    ms = result.get("time")
    config = {"family": FAMILY.name, "params": bench.config(result).params}
    return Tried(at, ms * 1e3 if isinstance(ms, float) else None, config)


def spread(configs: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """At most so many, evenly spread over the list."""
    count = min(most, len(configs))
    return [configs[n * len(configs) // count] for n in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", help="a name of `evoattn problems`, or a shape")
    parser.add_argument("--seconds", type=float, default=60.0, help="from the start of this process")
    parser.add_argument("--given", type=Path, help="what by_evoattn wrote: its right configs are tried, and no others")
    parser.add_argument(
        "--most",
        type=int,
        metavar="N",
        help="only N of those, evenly spread over the search: the first ones are those that compile fastest",
    )
    parser.add_argument("--answers", choices=["device", "host"], default="device")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    devices = detect_devices()
    if not devices or devices[0].spec is None:
        sys.exit("There is no CUDA device that evoattn knows.")
    os.environ["CUPY_CACHE_DIR"] = tempfile.mkdtemp()  # a second run would find the first one's kernels
    problem, gpu = by_name_or_shape(options.problem), devices[0].spec
    if options.given:
        right = [one.config["params"] for one in found.read(options.given).tried if one.us is not None]
        configs = spread(right, options.most or len(right))
        bench = Bench(problem, gpu, lambda chosen: configs[chosen[GIVEN]])
        threads = {bench.launch({GIVEN: n}).block[0] for n in range(len(configs))}
        space: dict[str, list[Any]] = {GIVEN: list(range(len(configs))), THREADS: sorted(threads)}
        by_threads = [bench.launch({GIVEN: n}).block[0] for n in range(len(configs))]
        limits = [f"{THREADS} == {by_threads}[{GIVEN}]"]
        results = tune(bench, space, limits, None, options.answers == "host", options.seed)
    else:
        bench = Bench(problem, gpu, params_of)
        left = options.seconds - (time.time() - STARTED)
        space, limits = tune_params(problem, gpu), restrictions(problem, gpu)
        results = tune(bench, space, limits, left, options.answers == "host", options.seed)
    tool = f"Kernel Tuner {version('kernel-tuner')}"
    Found(tool, "evoattn", options.problem, [tried(bench, result) for result in results]).write(options.output)


if __name__ == "__main__":
    main()
