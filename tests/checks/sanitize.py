"""compute-sanitizer over the kernels that we show, on the CUDA device that is here.

    python -m tests.checks.sanitize PROBLEM… [--family NAME]… [--configs FILE [--alone]] [--tools memcheck,synccheck]
                                         [--top 1] [--jobs 12]

For each problem the first `--top` configs of each family in FILE (of `scripts/best_configs.py`), and, but with
`--alone`, the first `--top` valid starting configs, of each family that takes the problem (or of those named). Each
runs on ragged lengths and on strided views, under each tool in a process of its own. Prints what is not clean, a line
of counts a family, and ends with exit code 1 if a tool found something that counts (`is_damning`)."""

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evoattn.backends.compiler import CompileError, compile_candidate
from evoattn.bench.contenders import read_configs
from evoattn.correctness import sanitizer
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import load_space
from evoattn.families.render import render
from evoattn.model import gpu as gpus
from evoattn.model import shape_text as problems
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import ConfigError, KernelConfig
from evoattn.search.starting import starting_configs


def chosen(
    problem: AttentionProblem, gpu: gpus.GpuSpec, file: Path | None, top: int, families: list[str], alone: bool = False
) -> list[KernelConfig]:
    """`top` valid configs of each family out of the file, and, if not it `alone`, as many starting configs; no config
    twice.

    Raises as `read_configs` does."""
    theirs = read_configs(file, problem, gpu.arch) if file else []
    configs: dict[str, KernelConfig] = {}
    for name in families:
        family = registry.lookup(name)
        if family.why_unsupported(problem, gpu):
            continue
        space, recorded = load_space(name, gpu), []
        for params in (params for theirs_family, params in theirs if theirs_family == name):
            try:
                recorded.append(space.make_config(params))
            except ConfigError as error:
                print(f"{problem.describe()}: a config of {file} is passed over: {error}")
        for source in (recorded, [] if alone else starting_configs(space, problem, gpu)):
            valid = [config for config in source if family.why_invalid(problem, config, gpu) is None]
            configs |= {config.id: config for config in valid[:top]}
    return list(configs.values())


def verdicts(
    problem: AttentionProblem, config: KernelConfig, gpu: gpus.GpuSpec, tools: tuple[str, ...]
) -> tuple[dict[str, str], bool]:
    """What the tools say, and whether it counts."""
    family = registry.lookup(config.family)
    try:
        kernel = compile_candidate(render(family, problem, config, gpu))
    except CompileError as error:
        return {"compiler": str(error)}, True
    said = sanitizer.sanitize(problem, BuiltKernel(family, config, gpu, kernel), tools)
    return said, sanitizer.is_damning(said, kernel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="+", type=problems.by_name_or_shape)
    parser.add_argument("--family", action="append", choices=registry.FAMILIES)
    parser.add_argument("--configs", type=Path)
    parser.add_argument("--alone", action="store_true", help="the configs of FILE alone")
    parser.add_argument("--tools", default=",".join(sanitizer.TOOLS), help="of compute-sanitizer")
    parser.add_argument("--top", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=12)
    options = parser.parse_args()
    devices = gpus.detect_devices()
    if not devices:
        sys.exit("sanitize.py needs a CUDA device in this machine.")
    gpu, started, damning = devices[0].spec, time.monotonic(), 0
    assert gpu is not None  # or there would be no device
    counts: Counter[tuple[str, str, str]] = Counter()
    families, tools = options.family or list(registry.FAMILIES), tuple(options.tools.split(","))
    work = [
        (problem, config)
        for problem in options.problems
        for config in chosen(problem, gpu, options.configs, options.top, families, options.alone)
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        for (problem, config), (said, counted) in zip(
            work, pool.map(lambda job: verdicts(job[0], job[1], gpu, tools), work), strict=True
        ):
            damning += counted
            for tool, sentence in said.items():
                clean = sentence == sanitizer.CLEAN
                counts[config.family, tool, "clean" if clean else "not clean"] += 1
                if not clean:
                    print(
                        f"{'BAD ' if counted else 'note'} {problem.describe()}, {tool}: {sentence} {config.describe()}",
                        flush=True,
                    )
    for (family, tool, state), count in sorted(counts.items()):
        print(f"{family:16} {tool:10} {count:3} {state}")
    print(f"{len(work)} kernels, {damning} with findings that count, {time.monotonic() - started:.0f} s")
    sys.exit(1 if damning else 0)


if __name__ == "__main__":
    main()
