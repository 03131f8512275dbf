#!/usr/bin/env python3
"""Whether a choice between two kernels is another one in fp16 than in bf16: two kernels of a problem, timed in both.

    python scripts/dtype_twins.py reports/measurements/h100.npz/h100-2026-11-22-u0 [--count 14] [--below 20] [--jobs 14]

Of the campaign's problems in fp16 and in bf16 whose best time is `--below` so many µs, `--count` of each are drawn at
random, with the fastest and the slowest kernel recorded (in campaign u a pick and the winner of a search). They are
timed in turns on the problem and on its twin in the other dtype. Prints the slower's time over the faster's in both,
and the geometric means by the dtype that the problem was recorded in.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gangs import build, compilers

from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GpuSpec, detect_devices
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from scripts.cost.measured import read
from scripts.cost.row import Row

DTYPES = ("fp16", "bf16")
ROUNDS, SEED = 9, 3
Pair = tuple[AttentionProblem, KernelConfig, KernelConfig]


def drawn_pairs(rows: list[Row], gpu: GpuSpec, count: int, below: float) -> list[Pair]:
    """(problem, faster kernel, slower) of `count` problems of each dtype."""
    groups: dict[AttentionProblem, list[Row]] = defaultdict(list)
    for row in rows:
        if row.gpu.name == gpu.name and row.problem.dtype in DTYPES:
            groups[row.problem].append(row)
    found: dict[str, list[Pair]] = {dtype: [] for dtype in DTYPES}
    for problem, group in groups.items():
        first, last = (choose(group, key=lambda row: row.us) for choose in (min, max))
        twins = [problem.with_(dtype=dtype) for dtype in DTYPES]
        configs = (first.config, last.config)
        fits = all(FAMILIES[c.family].why_impossible(twin, c, gpu) is None for c in configs for twin in twins)
        if first.us < below and first.config != last.config and fits:
            found[problem.dtype].append((problem, *configs))
    draw = random.Random(SEED)
    return [pair for dtype in DTYPES for pair in draw.sample(found[dtype], min(count, len(found[dtype])))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaigns", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=14, help="problems of each dtype")
    parser.add_argument("--below", type=float, default=20.0, help="µs of the best kernel")
    parser.add_argument("--jobs", type=int, default=14, help="compiles at once")
    asked = parser.parse_args()
    devices = detect_devices()
    if not devices or devices[0].spec is None:
        print("There is no known CUDA device here.", file=sys.stderr)
        return 2
    gpu = devices[0].spec
    pairs = drawn_pairs(read(asked.campaigns), gpu, asked.count, asked.below)
    twins = [(p, p.with_(dtype=dtype), configs) for p, *configs in pairs for dtype in DTYPES]
    from evoattn.portfolio.engine.stage import Stage  # it loads CUDA

    stage, logs = Stage(SEED), defaultdict(list)
    stage(("register", "", [twin for _, twin, _ in twins]))
    with compilers(asked.jobs) as pool:
        waiting = [[pool.submit(build, twin, c, gpu) for c in configs] for _, twin, configs in twins]
        for index, (problem, twin, configs) in enumerate(twins):
            (faster, slower), *_ = stage(("final", "", index, [one.result() for one in waiting[index]], ROUNDS, ()))
            logs[problem.dtype, twin.dtype].append(math.log(slower / faster))
            families = " ".join(dict.fromkeys(c.family for c in configs))
            print(f"{faster:8.2f} {slower:8.2f} {slower / faster:6.3f}  {twin.describe()}  {families}", flush=True)
    for (recorded, timed), found in logs.items():
        print(f"recorded in {recorded}, timed in {timed}: {len(found)} problems, {math.exp(fmean(found)):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
