"""What the GPU worker does with its time: candidates checked and timed in this process, under Python's profiler.

    python scripts/device_profile.py [--problem seed_h100] [--family flash_wgmma] [--candidates 24] [--lines 40]
                                     [--within capture_end]

Prints what it takes until the first candidate can be timed, ms per candidate by check and in timing, then the functions
that took the most time of their own, and what is called `--within` those of a name.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evoattn.backends.compiler import CompileError, compile_candidate
from evoattn.evaluation.device import DeviceEvaluator
from evoattn.evaluation.tasks import Evaluate
from evoattn.families import registry
from evoattn.families.base import Family
from evoattn.families.built import BuiltKernel
from evoattn.families.render import render
from evoattn.model import gpu as gpus
from evoattn.model import named_problems as problems
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, load_space
from evoattn.samplers.pool import ConfigPool

THREADS = 8
STARTING_LINES = 12


def configs_of(family: Family, problem: AttentionProblem, gpu: GpuSpec, count: int) -> list[KernelConfig]:
    """Four starting configs and random valid ones, the same in every run."""
    space, rng = load_space(family.name, gpu), random.Random(0)

    def why_invalid(_: str, params: dict[str, Any]) -> str | None:
        return family.why_invalid(problem, KernelConfig(family.name, params), gpu)

    pool = ConfigPool({family.name: space}, why_invalid, rng)
    configs = list(space.starting_configs())[:4]
    while len(configs) < count:
        if params := pool.claim(family.name, {p.name: rng.choice(p.values) for p in space.parameters}):
            configs.append(space.make_config(params))
    return configs


def built(family: Family, problem: AttentionProblem, gpu: GpuSpec, configs: list[KernelConfig]) -> list[BuiltKernel]:
    """The kernels of those that compile."""

    def build(config: KernelConfig) -> BuiltKernel | None:
        try:
            return BuiltKernel(family, config, gpu, compile_candidate(render(family, problem, config, gpu)))
        except CompileError:
            return None

    with ThreadPoolExecutor(THREADS) as threads:
        return [kernel for kernel in threads.map(build, configs) if kernel]


def evaluated(
    evaluator: DeviceEvaluator, kernels: list[BuiltKernel], best: float | None, profile: cProfile.Profile | None
) -> float | None:
    """Evaluate all of them and print ms per candidate, by part; the least time in µs, `best` included."""
    parts, states = Counter[str](), Counter[str]()
    began = time.perf_counter()
    if profile:
        profile.enable()
    for kernel in kernels:
        found = evaluator.evaluate(Evaluate(kernel, best))
        states[found.state] += 1
        checks = found.validation.checks if found.validation else ()
        for check in checks:
            parts[check.case] += check.seconds
        parts["everything else"] += found.seconds - sum(check.seconds for check in checks)
        if found.timing and found.state == "COMPLETE":
            best = min(best or found.timing.median_us, found.timing.median_us)
    if profile:
        profile.disable()
    wall = time.perf_counter() - began
    shown = "none right" if best is None else f"best {best:.2f} µs"
    print(
        f"{len(kernels)} candidates{' under the profiler' if profile else ''}: {1e3 * wall / len(kernels):.2f} ms "
        f"each, {shown}, {dict(states)}"
    )
    for name, seconds in parts.most_common():
        print(f"{1e3 * seconds / len(kernels):8.2f} ms  {name}")
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", type=problems.by_name_or_shape, default=problems.lookup("seed_h100"))
    parser.add_argument("--family", default="flash_wgmma")
    parser.add_argument("--candidates", type=int, default=24)
    parser.add_argument("--lines", type=int, default=40)
    parser.add_argument("--within")
    words = parser.parse_args()
    devices = gpus.detect_devices()
    if not devices or devices[0].spec is None:
        print("scripts/device_profile.py measures, and there is no known CUDA device here.", file=sys.stderr)
        return 2
    problem, gpu, family = words.problem, devices[0].spec, registry.lookup(words.family)
    kernels = built(family, problem, gpu, configs_of(family, problem, gpu, words.candidates))
    began, start = time.perf_counter(), cProfile.Profile()
    evaluator = start.runcall(DeviceEvaluator, problem, gpu)
    print(f"{time.perf_counter() - began:.2f} s until the evaluator is made")
    pstats.Stats(start).sort_stats("tottime").print_stats(STARTING_LINES)
    for number in (1, 2):
        began = time.perf_counter()
        evaluator.evaluate(Evaluate(kernels[0], None))
        print(f"{1e3 * (time.perf_counter() - began):.1f} ms for candidate {number}")
    profile = cProfile.Profile()
    best = evaluated(evaluator, kernels, None, None)
    evaluated(evaluator, kernels, best, profile)
    stats = pstats.Stats(profile)
    stats.sort_stats("tottime").print_stats(words.lines)
    if words.within:
        stats.print_callees(words.within)
    return 0


if __name__ == "__main__":
    sys.exit(main())
