"""How far the timings can be trusted, on the CUDA device that is here: an A/A test and a search with a known
best config.

    python3 scripts/noise.py [--repeats 40] [--searches 3] [--faster 0.05]

A/A: one kernel under two names in `--repeats` finals; prints how often one is called the winner (expected: at most
5 %). Known best: a space whose configs are all one kernel with a delay that makes it slower by `--faster`, but for one,
which a whole search has to find; prints how often it did. Exit code 1 if a search missed it, or the A/A rate is over
15 %.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from source_edits import replaced

from evoattn.backends.compiler import compile_source
from evoattn.correctness.validate import run_case
from evoattn.evaluation.device import DeviceEvaluator
from evoattn.families import registry
from evoattn.families.base import Family
from evoattn.families.built import BuiltKernel
from evoattn.families.render import render
from evoattn.fleet.local import LocalFleet
from evoattn.model import gpu as gpus
from evoattn.model import named_problems as problems
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CompiledKernel, Timing
from evoattn.model.space import KernelConfig, SearchSpace, load_space
from evoattn.samplers.base import SamplerSetup
from evoattn.samplers.registry import make_sampler
from evoattn.search.budget import Budget
from evoattn.search.loop import Search
from evoattn.search.tools import Tools
from evoattn.storage import Storage
from evoattn.timing import benchmark, ranking
from evoattn.timing.contestant import calls_for_all
from evoattn.timing.protocol import FINAL
from evoattn.timing.timed_run import TimedRun

PROBLEM = problems.lookup("seed_h100")
FAMILY = registry.lookup("flash_scalar")
BASE = dict(
    BLOCK_M=64,
    BLOCK_N=32,
    THREADS_PER_ROW=8,
    ROWS_PER_THREAD=4,
    VECTOR_WIDTH=8,
    PADDING=8,
    KV_STAGES=1,
    Q_IN_REGISTERS=False,
    P_IN_SHARED=True,
    BLOCK_ORDER="tiles",
    BLOCKS_PER_SM=1,
    UNROLL=1,
)
FREE = ("VECTOR_WIDTH", "BLOCK_ORDER", "BLOCKS_PER_SM", "UNROLL")
"""Genes that change no launch: any of their configs can launch the one kernel."""
ENTRY = "  extern __shared__ __align__(16) unsigned char shared_memory[];\n"


def delayed(candidate: Candidate, cycles: int) -> Candidate:
    """The kernel with `cycles` of waiting in every block."""
    wait = f"  for (const long long born = clock64(); clock64() - born < {cycles};) {{}}\n" if cycles else ""
    return replace(candidate, source=replaced(candidate.source, ENTRY, ENTRY + wait))


def hold_final(evaluator: DeviceEvaluator, kernels: dict[str, CompiledKernel], seed: int) -> dict[str, Timing]:
    """The rounds of a final among `kernels` alone, each over the same buffers."""
    config, arena = KernelConfig("flash_scalar", BASE), evaluator.timed_arena()
    contestants = []
    for name, kernel in kernels.items():
        built = BuiltKernel(FAMILY, config, evaluator.gpu, kernel)
        result, outputs = run_case(evaluator.backend, built, evaluator.own)
        if not result.passed:
            raise RuntimeError(result.reason)
        contestants.append(TimedRun(evaluator.setup, built, outputs, arena).contestant(name))
    for contestant in contestants:
        contestant.probe()
    calls = calls_for_all(contestants, evaluator.setup.timer.launch_us, FINAL, "warm")
    for contestant in contestants:
        contestant.capture(calls)
    return benchmark.measure(contestants, FINAL, "warm", evaluator.clocks, seed=seed)


def a_a_test(evaluator: DeviceEvaluator, kernel: CompiledKernel, repeats: int) -> float:
    """Print and return the share of finals in which one of two equal kernels was called the winner."""
    started, wins, gaps, lucky = time.monotonic(), 0, [], 0
    for seed in range(repeats):
        timings = hold_final(evaluator, {"a": kernel, "b": kernel}, seed)
        first = min(timings, key=lambda name: timings[name].median_us)
        ratio = next(iter(ranking.against_leader(timings, first).values()))
        wins += not ratio.tie
        gaps.append(ratio.median - 1)
        smallest = sorted(min(t.samples_us) for t in timings.values())
        lucky += smallest[1] / smallest[0] > 1.002
    gaps.sort()
    us = median(t.median_us for t in timings.values())
    print(
        f"A/A: {repeats} finals of one kernel ({us:.2f} µs) under two names, {time.monotonic() - started:.0f} s: "
        f"{wins} called a win ({wins / repeats:.1%}); gap of the medians {median(gaps):+.2%}, largest {gaps[-1]:+.2%}; "
        f"by the smallest sample {lucky} would differ by over 0.2 %. Clocks: {timings['a'].protocol['clocks']}"
    )
    return wins / repeats


def calibrate(evaluator: DeviceEvaluator, base: Candidate, faster: float) -> int:
    """Cycles of delay that make the kernel slower by `faster`; prints the ratio it comes to."""
    plain, low, high = compile_source(base.source, base.arch), 0, 1 << 17

    def ratio(cycles: int) -> float:
        slow = compile_source(delayed(base, cycles).source, base.arch)
        timings = hold_final(evaluator, {"plain": plain, "delayed": slow}, cycles)
        return ranking.compare(timings["delayed"], timings["plain"]).median

    for _ in range(10):
        middle = (low + high) // 2
        low, high = (middle, high) if ratio(middle) < 1 + faster else (low, middle)
    print(f"A delay of {high} cycles per block makes the kernel {ratio(high) - 1:+.2%} slower.")
    return high


def space_with_known_best(spec: gpus.GpuSpec) -> SearchSpace:
    """The family's space with every gene fixed but the free ones."""
    space = load_space("flash_scalar", spec)
    parameters = tuple(p if p.name in FREE else replace(p, values=(BASE[p.name],)) for p in space.parameters)
    return replace(space, parameters=parameters, starting=())


@dataclass(frozen=True)
class Delayed:
    """A renderer of one kernel, slower by `cycles` in all configs but one."""

    base: Candidate
    cycles: int
    known_best: str

    def __call__(self, family: Family, problem: AttentionProblem, config: KernelConfig, gpu: gpus.GpuSpec) -> Candidate:
        source = (self.base if config.id == self.known_best else delayed(self.base, self.cycles)).source
        return replace(self.base, config=config.params, config_id=config.id, source=f"{source}// {config.id}\n")


def finds_known_best(spec: gpus.GpuSpec, base: Candidate, cycles: int, seed: int) -> bool:
    """One search; prints what it found."""
    spaces = {"flash_scalar": space_with_known_best(spec)}

    def why_invalid(family: str, params: dict) -> str | None:
        return FAMILY.why_invalid(PROBLEM, KernelConfig(family, params), spec)

    valid = make_sampler("random", SamplerSetup(spaces, 0, why_invalid)).ask(10_000)
    known_best = random.Random(seed).choice([KernelConfig(p.family, p.params).id for p in valid])

    started = time.monotonic()
    tools = Tools(render=Delayed(base, cycles, known_best))
    with TemporaryDirectory() as folder:
        storage = Storage.open(f"{folder}/noise.sqlite")
        study = storage.create_study(
            f"known best {seed}", PROBLEM, spec, False, "genetic", seed, ("flash_scalar",), {}, {}
        )
        sampler = make_sampler("genetic", SamplerSetup(spaces, seed, why_invalid))
        running = Search(storage, study, PROBLEM, spec, spaces, sampler, LocalFleet(os.cpu_count() or 1), tools=tools)
        progress = running.run(Budget(trials=len(valid)))
        leader = storage.leaderboard(study, 1)[0]
        storage.close()
    found = leader.config_id == known_best and not progress.tied_with
    who = "the known best" if leader.config_id == known_best else "ANOTHER"
    print(
        f"Known best {seed}: {len(valid)} configs, {time.monotonic() - started:.0f} s, "
        f"led by {who} at {leader.timing.median_us:.2f} µs, "
        f"a tie with {len(progress.tied_with)} others: {'found' if found else 'MISSED'}"
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--searches", type=int, default=3)
    parser.add_argument("--faster", type=float, default=0.05)
    words = parser.parse_args()
    devices = gpus.detect_devices()
    if not devices or devices[0].spec is None:
        print("scripts/noise.py measures, and there is no known CUDA device here.", file=sys.stderr)
        return 2
    spec = devices[0].spec
    evaluator = DeviceEvaluator(PROBLEM, spec)
    base = render(FAMILY, PROBLEM, KernelConfig("flash_scalar", BASE), spec)
    rate = a_a_test(evaluator, compile_source(base.source, base.arch), words.repeats)
    cycles = calibrate(evaluator, base, words.faster)
    found = [finds_known_best(spec, base, cycles, seed) for seed in range(words.searches)]
    print(f"A/A false wins {rate:.1%}; known best config found in {sum(found)} of {len(found)} searches.")
    return 0 if all(found) and rate <= 0.15 else 1


if __name__ == "__main__":  # workers are spawned: they import this file again
    sys.exit(main())
