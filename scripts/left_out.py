"""Where the time of a `flash_wgmma` kernel goes: the same kernel with one stage of its work left out, timed beside the
whole one.

    python3 scripts/left_out.py PROBLEM… [--configs FILE]

Runs on the CUDA device that is here. For each problem the first `flash_wgmma` config that FILE (of
`scripts/best_configs.py`) has for it, else the first valid starting config, is rendered, and the source is edited:
without exponentials, with one k16 step of each product, without copies of K and V, without all three, and a kernel that
returns at once. What is left computes nonsense: only its time counts, medians of interleaved rounds, µs per call.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from source_edits import replaced

from evoattn.backends.compiler import compile_candidate
from evoattn.bench.contenders import read_configs
from evoattn.evaluation.device import DeviceEvaluator
from evoattn.families import registry
from evoattn.families.render import render
from evoattn.model import gpu as gpus
from evoattn.model import named_problems as problems
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate
from evoattn.model.space import KernelConfig, load_space
from evoattn.search.starting import starting_configs
from evoattn.timing import benchmark
from evoattn.timing.contestant import Contestant, calls_for_all
from evoattn.timing.protocol import FINAL
from evoattn.timing.replay_watch import ReplayWatch

FAMILY = registry.lookup("flash_wgmma")

Edit = tuple[str, str]
NO_EXPONENTIALS: Edit = ('asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));', "y = x;")
ONE_STEP_OF_QK: Edit = ("step < Tiles::DIM_STEPS; ++step) {\n      wgmma_qk", "step < 1; ++step) {\n      wgmma_qk")
ONE_STEP_OF_PV: Edit = ("step < KEY_STEPS; ++step) wgmma_pv", "step < 1; ++step) wgmma_pv")
LOAD_KV = (
    "Tiles::template load<ROWS>(tiles_smem + at.stage * Tiles::bytes(ROWS), map, full_smem + 8 * at.stage, "
    "row, head, batch);"
)
NO_KV_COPIES: Edit = (  # but for the first tile of each stage: garbage would take the path of sums too high
    LOAD_KV,
    f"if (at.places >= STAGES) mbarrier_arrive(full_smem + 8 * at.stage); else {LOAD_KV}",
)
COUNT_PLACES: Edit = ("    if (++stage == STAGES)", "    ++places;\n    if (++stage == STAGES)")
PLACES: Edit = ("  uint32_t parity = 0;\n", "  uint32_t parity = 0;\n  int places = 0;\n")
NOTHING: Edit = (
    "  extern __shared__ __align__(1024) unsigned char smem[];\n",
    "  if (seqlen_q > 0) return;\n  extern __shared__ __align__(1024) unsigned char smem[];\n",
)
VARIANTS: dict[str, tuple[Edit, ...]] = {
    "whole": (),
    "no exp": (NO_EXPONENTIALS,),
    "1 k-step": (ONE_STEP_OF_QK, ONE_STEP_OF_PV),
    "no K/V": (NO_KV_COPIES, COUNT_PLACES, PLACES),
    "none of them": (NO_EXPONENTIALS, ONE_STEP_OF_QK, ONE_STEP_OF_PV, NO_KV_COPIES, COUNT_PLACES, PLACES),
    "empty": (NOTHING,),
}
"""Column: what is edited."""


def edited(candidate: Candidate, edits: tuple[Edit, ...]) -> Candidate:
    """Raises `AnchorError` where the source has not exactly one place for an edit: the template has changed."""
    source = candidate.source
    for old, new in edits:
        source = replaced(source, old, new)
    return replace(candidate, source=source)


def config_for(problem: AttentionProblem, gpu: gpus.GpuSpec, file: Path | None) -> KernelConfig:
    """The first of the file, else the first starting config, that is valid and needs no scratch memory: a kernel with a
    stage left out may not leave that as it was. Raises `ConfigError` or `OSError` as `read_configs` does, and
    `ValueError` where there is none."""
    space = load_space("flash_wgmma", gpu)
    theirs = [
        params for family, params in (read_configs(file, problem, gpu.arch) if file else []) if family == "flash_wgmma"
    ]
    for config in (*map(space.make_config, theirs), *starting_configs(space, problem, gpu)):
        if FAMILY.why_invalid(problem, config, gpu) is None and not FAMILY.workspace(problem, config, gpu):
            return config
    raise ValueError(f"flash_wgmma has no valid config without scratch memory for {problem.describe()}.")


def time_variants(problem: AttentionProblem, config: KernelConfig, gpu: gpus.GpuSpec) -> dict[str, float]:
    """Median µs per call of every variant, interleaved, warm L2."""
    evaluator = DeviceEvaluator(problem, gpu)
    arena, candidate = evaluator.timed_arena(), render(FAMILY, problem, config, gpu)
    contestants, timer = [], evaluator.setup.timer
    for name, edits in VARIANTS.items():
        kernel = compile_candidate(edited(candidate, edits))
        enqueue = evaluator.backend.prepare(kernel, FAMILY.launches(problem, config, gpu), arena.buffers)
        contestants.append(Contestant(name, enqueue, timer, ReplayWatch(arena, None)))
    for contestant in contestants:
        contestant.probe()
    calls = calls_for_all(contestants, timer.launch_us, FINAL, "warm")
    for contestant in contestants:
        contestant.capture(calls)
    timings = benchmark.measure(contestants, FINAL, "warm", evaluator.clocks)
    return {name: timing.median_us for name, timing in timings.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", nargs="+", type=problems.by_name_or_shape)
    parser.add_argument("--configs", type=Path)
    options = parser.parse_args()
    devices = gpus.detect_devices()
    if not devices or devices[0].spec.arch != "sm_90a":
        sys.exit("left_out.py needs a Hopper GPU in this machine.")
    print(f"{'µs':18}" + "".join(f"{name:>14}" for name in VARIANTS))
    for problem in options.problems:
        try:
            config = config_for(problem, devices[0].spec, options.configs)
        except (ValueError, OSError) as error:
            sys.exit(str(error))
        medians = time_variants(problem, config, devices[0].spec)
        columns = "".join(f"{medians[variant]:14.2f}" for variant in VARIANTS)
        print(f"{problem.name or 'shape':18}{columns}   {config.describe()}", flush=True)


if __name__ == "__main__":
    main()
