#!/usr/bin/env python3
"""What gangs of blocks are worth to a balanced schedule: kernels with them, without, and others, timed in turns.

    python scripts/gangs.py CAMPAIGN… [--problems 12] [--queries 32] [--jobs 12] [--list]

Of the campaigns' problems of so many queries or more those are taken on which a kernel with SCHEDULE=balanced that has
gangs today (`evoattn/families/gangs.py`) took the largest part more than the best; of each the fastest such kernel of
each BLOCK_M. Each is proved on the problem and timed with gangs, without, as SCHEDULE=fixed, and beside the best other
kernel of the campaigns. `--list` compiles and times nothing, and says how often K and V are read from memory, by a
simulation. `--once WORDS` launches the first kernel of one problem three times with gangs and three times without, for
Nsight Compute:

    ncu --metrics dram__bytes_read.sum,lts__t_sector_hit_rate.pct,gpu__time_duration.sum \\
        -k flash_wgmma python scripts/gangs.py CAMPAIGN… --once "B=5 H=12"
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import sys
from collections import OrderedDict, defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evoattn.backends.compiler import compile_candidate
from evoattn.families.built import BuiltKernel
from evoattn.families.flash_wgmma.genes import FlashWgmmaGenes
from evoattn.families.flash_wgmma.resources import gang_size, grid, row_tiles
from evoattn.families.registry import FAMILIES
from evoattn.families.render import render
from evoattn.model.gpu import GPUS, GpuSpec, detect_devices
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel
from evoattn.model.space import KernelConfig
from scripts.cost.measured import read
from scripts.cost.row import Row

FAMILY = "flash_wgmma"
ALL_HELD = 1 << 40
"""Bytes of an L2 that holds all keys: no gangs."""
HELD_BYTES = 30e6
"""Of L2, for `reads_of_keys`: by it an H100's recorded times are those of the bytes at 3 TB/s, within a tenth."""
ROUNDS, SEED = 7, 11


@dataclass(frozen=True)
class Compared:
    """A problem, its balanced kernels with gangs, the slowest first, and the best other one."""

    problem: AttentionProblem
    balanced: list[Row]
    best: Row


def gang_of(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> int:
    """Blocks of a gang of the config; 1 where it has none, 0 where it cannot run."""
    if config.family != FAMILY or config["SCHEDULE"] != "balanced":
        return 1
    if FAMILIES[FAMILY].why_impossible(problem, config, gpu):
        return 0
    return gang_size(problem, FlashWgmmaGenes.of(config), gpu)


def compared(rows: list[Row], gpu: GpuSpec, problems: int, queries: int) -> list[Compared]:
    """The worst first."""
    groups: dict[AttentionProblem, list[Row]] = defaultdict(list)
    for row in rows:
        if row.gpu.name == gpu.name and row.problem.seqlen_q >= queries:
            groups[row.problem].append(row)
    found = []
    for problem, group in groups.items():
        group.sort(key=lambda row: row.us)
        with_gangs = {row.config["BLOCK_M"]: row for row in reversed(group) if gang_of(problem, row.config, gpu) > 1}
        others = [row for row in group if gang_of(problem, row.config, gpu) == 1]
        if with_gangs and others:
            found.append(Compared(problem, sorted(with_gangs.values(), key=lambda row: -row.us), others[0]))
    return sorted(found, key=lambda one: -one.balanced[0].us / one.best.us)[:problems]


def variants(one: Compared, gpu: GpuSpec) -> list[tuple[str, KernelConfig, GpuSpec]]:
    """(name, config, GPU that launches are made for) of all that is timed on the problem, the best other one first."""
    chosen = [(f"best other: {one.best.config['BLOCK_M']}x{one.best.config['BLOCK_N']}", one.best.config, gpu)]
    for row in one.balanced:
        name = f"{row.config['BLOCK_M']}x{row.config['BLOCK_N']} {row.config['TILE_ORDER']}"
        fixed = KernelConfig(FAMILY, row.config.params | {"SCHEDULE": "fixed"})
        chosen.append((f"{name}, gangs", row.config, gpu))
        chosen.append((f"{name}, none (recorded {row.us:.1f})", row.config, gpu.with_limits({"l2_bytes": ALL_HELD})))
        if FAMILIES[FAMILY].why_invalid(one.problem, fixed, gpu) is None:
            chosen.append((f"{name}, fixed", fixed, gpu))
    return chosen


def reads_of_keys(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, held: float = HELD_BYTES) -> float:
    """Times that a balanced kernel with TILE_ORDER=by_head reads K and V from memory, if all blocks take as long for a
    tile of keys and L2 keeps the `held` bytes of them that were read last."""
    genes = FlashWgmmaGenes.of(config)
    gang, gangs, _ = grid(problem, genes, gpu)
    rows, heads = row_tiles(problem, genes)
    key_tiles = math.ceil(problem.seqlen_k / genes.BLOCK_N)
    units, sharing = rows * heads // gang, rows * heads // (problem.kv_heads * problem.batch)
    whole = max(0, units // gangs - 1)
    steps = (units - whole * gangs) * key_tiles
    work = []  # of each gang: key tiles, counted through all of its units, in its order
    for b in range(gangs):
        first = [turn * gangs + b for turn in range(whole)]
        taken = [unit * key_tiles + key for unit in first for key in reversed(range(key_tiles))]
        cut = range(b * steps // gangs, (b + 1) * steps // gangs)
        work.append(taken + [whole * gangs * key_tiles + step for step in reversed(cut)])
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    places, missed = int(held / (genes.BLOCK_N * (problem.head_dim + problem.head_dim_v) * problem.element_bytes)), 0
    for time in range(max(map(len, work))):
        for member, taken in itertools.product(range(gang), work):
            if time >= len(taken):
                continue
            unit, key = divmod(taken[time], key_tiles)
            tile = (unit * gang + member) // sharing, key
            missed += tile not in cache
            cache[tile] = None
            cache.move_to_end(tile)
            if len(cache) > places:
                cache.popitem(last=False)
    return missed / (problem.batch * problem.kv_heads * key_tiles)


def compilers(jobs: int) -> ProcessPoolExecutor:
    """Processes for `build`; none of them inherits a CUDA context."""
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))


def build(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> BuiltKernel:
    candidate = render(FAMILIES[config.family], problem, config, gpu)
    compiled: CompiledKernel = compile_candidate(candidate)
    return BuiltKernel(FAMILIES[config.family], config, gpu, compiled)


def time_all(chosen: list[Compared], gpu: GpuSpec, jobs: int) -> None:
    """Prints each problem's times; wrong kernels are named."""
    from evoattn.portfolio.engine.stage import Stage  # it loads CUDA

    stage, plans = Stage(SEED), [variants(one, gpu) for one in chosen]
    stage(("register", "", [one.problem for one in chosen]))
    with compilers(jobs) as pool:
        waiting = [
            [pool.submit(build, one.problem, config, of) for _, config, of in plan]
            for one, plan in zip(chosen, plans, strict=True)
        ]
        for index, (one, plan) in enumerate(zip(chosen, plans, strict=True)):
            kernels = [kernel.result() for kernel in waiting[index]]
            print(f"{one.problem.describe()}: {one.problem.bytes / gpu.dram_gb_per_s / 1e3:.1f} µs of memory")
            for (name, *_), kernel in zip(plan, kernels, strict=True):
                if name.endswith("gangs") and (wrong := stage(("prove", "", index, kernel))):
                    print(f"  WRONG: {name}: {wrong}")
            times, *_ = stage(("final", "", index, kernels, ROUNDS, ()))
            for (name, config, of), us in zip(plan, times, strict=True):
                grid = FAMILIES[config.family].launches(one.problem, config, of)[0].grid
                print(f"  {us or float('nan'):9.1f} µs  {config.family} {name}, grid {grid}", flush=True)


def launch_once(one: Compared, gpu: GpuSpec) -> None:
    """The first balanced kernel, three times with gangs and three times without."""
    import torch

    from evoattn.backends.cuda import CudaBackend
    from evoattn.portfolio.engine.memory import Memory

    memory = Memory(CudaBackend(), SEED)
    memory.reserve(one.problem)
    for _, config, of in variants(one, gpu)[1:3]:
        call = memory.prepare(build(one.problem, config, of), one.problem)
        for _ in range(3):
            call()
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaigns", nargs="+", type=Path)
    parser.add_argument("--problems", type=int, default=12)
    parser.add_argument("--queries", type=int, default=32, help="the least")
    parser.add_argument("--jobs", type=int, default=12, help="compiles at once")
    parser.add_argument("--list", action="store_true", help="print what would be timed on an H100; needs no GPU")
    parser.add_argument("--once", metavar="WORDS", help="of the problem that begins so")
    asked = parser.parse_args()
    devices = [] if asked.list else detect_devices()
    gpu = devices[0].spec if devices else GPUS["h100"] if asked.list else None
    if gpu is None:
        print("There is no known CUDA device here.", file=sys.stderr)
        return 2
    chosen = compared(read(asked.campaigns), gpu, asked.problems, asked.queries)
    if asked.list:
        for one in chosen:
            print(f"{one.problem.describe()}: best other {one.best.us:.1f} µs")
            for name, config, of in variants(one, gpu)[1:]:
                by_head = config["SCHEDULE"] == "balanced" and config["TILE_ORDER"] == "by_head"
                reads = f", {reads_of_keys(one.problem, config, of):.2f} reads of K and V" if by_head else ""
                print(f"  {name}, grid {FAMILIES[FAMILY].launches(one.problem, config, of)[0].grid}{reads}")
    elif asked.once:
        named = [one for one in chosen if one.problem.describe().startswith(asked.once)]
        if not named:
            print(f"No problem begins with {asked.once!r}; --list prints them.", file=sys.stderr)
            return 2
        launch_once(named[0], gpu)
    else:
        time_all(chosen, gpu, asked.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
