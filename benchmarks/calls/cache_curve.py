"""How much less time does a cache of 8 bits take than one of 16, by its length?

    python -m benchmarks.calls.cache_curve                              # the pick and what comes next by the cost model
    python -m benchmarks.calls.cache_curve --campaign cache8.jsonl.gz   # and the kernels that a campaign measured

Decoding over caches of many lengths and batches: of each problem some kernels for a bf16 cache and some for an e4m3 one
are timed, then the best of both in turns, in CUDA graphs. `limit` is the time of the 8-bit cache's bytes at the card's
bandwidth over that of the 16-bit one's: about a half.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from evoattn.backends.compiler import compile_candidate
from evoattn.engine.groups import Group
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.families.render import render
from evoattn.model.gpu import GpuSpec, detect_devices
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from evoattn.portfolio import campaign
from evoattn.portfolio.campaign import group_of
from evoattn.portfolio.pick import portfolio_kernels, whole

HEADS = "H=32,Hkv=8,Sq=1,dtype=bf16"
SHAPES = (
    *(f"B=1,{HEADS},D=128,Sk={keys}" for keys in (256, 1024, 4096, 16384, 32768, 65536, 131072)),
    *(f"B=16,{HEADS},D=128,Sk={keys},seqused={keys}:{keys},page=16" for keys in (256, 1024, 4096, 16384)),
    *(f"B=64,{HEADS},D=128,Sk={keys},seqused={keys}:{keys},page=64" for keys in (256, 1024, 4096, 16384)),
    *(f"B=128,{HEADS},D=128,Sk={keys}" for keys in (256, 1024, 4096)),
    *(f"B=16,{HEADS},D=64,Sk={keys}" for keys in (1024, 4096, 32768)),
    *(f"B=16,{HEADS},D=64,Sk={keys},seqused={keys}:{keys},page=16" for keys in (1024, 8192)),
)
ROUNDS = 7
EIGHT = {"kv": "e4m3", "scales": "head"}


def compiled(problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> CompiledKernel:
    """In a process of its own."""
    return compile_candidate(render(registry.lookup(config.family), problem, config, gpu))


def candidates(problem: AttentionProblem, gpu: GpuSpec, measured: list[Group], count: int) -> list[KernelConfig]:
    """The pick and those next to it, and those that were fast on the group's problems next to this one."""
    found = {config.id: config for config in portfolio_kernels(problem, gpu)[:count]}
    for group in measured:
        if group.name != group_of(problem):
            continue
        sizes = [abs(math.log(p.bytes / problem.bytes)) for p in group.problems]
        for index in sorted(range(len(sizes)), key=sizes.__getitem__)[:2]:
            timed = [(k.times[index], k) for k in group.kernels.values() if k.state == "right" and index in k.times]
            for _, kernel in sorted(timed, key=lambda row: row[0])[:count]:
                found[kernel.config.id] = kernel.config
    able = registry.lookup
    return [c for c in found.values() if not able(c.family).why_impossible(problem, c, gpu)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--campaign", type=Path, help="of `evoattn portfolio measure --kinds eight_bits`")
    parser.add_argument("--each", type=int, default=6, help="kernels of each problem and dtype")
    parser.add_argument("--shapes", help="semicolons between them; those of the table unless given")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    gpu = detect_devices()[0].spec
    assert gpu is not None
    measured = campaign.load(words.campaign)[1] if words.campaign else []
    problems = [parse_shape(text) for text in (words.shapes.split(";") if words.shapes else SHAPES)]
    pairs = [(problem, problem.with_(**EIGHT)) for problem in problems]
    wanted = {p: candidates(p, gpu, measured, words.each) for pair in pairs for p in pair}
    keys = {(group_of(p), whole(c).id): (p, whole(c)) for p, configs in wanted.items() for c in configs}
    with ProcessPoolExecutor() as workers:
        found = workers.map(compiled, *zip(*keys.values(), strict=True), [gpu] * len(keys))
        kernels = dict(zip(keys, found, strict=True))
    from evoattn.evaluation.survey import Surveyor
    from evoattn.evaluation.tasks import Survey

    surveyor, checked = Surveyor(), dict[tuple[str, str], bool]()
    rows, ratios = list[dict[str, object]](), list[float]()

    def time_of(problem: AttentionProblem, config: KernelConfig) -> float:
        key = group_of(problem), whole(config).id
        kernel = BuiltKernel(registry.lookup(config.family), config, gpu, kernels[key])
        answer = surveyor.times(Survey(kernel, (problem,), (math.inf,), check=key not in checked))
        checked.setdefault(key, not answer.failure)
        if answer.failure:
            print(f"  {config.describe()}: {answer.failure}", flush=True)
        return answer.times[0][0] if checked[key] and answer.times else math.inf

    print("| problem | 16 bits, µs | 8 bits, µs | ratio | limit | GB/s of 8 bits | kernels |")
    print("|---|---|---|---|---|---|---|")
    for pair in pairs:
        best = [min(wanted[p], key=partial(time_of, p)) for p in pair]
        turns = [[time_of(p, config) for p, config in zip(pair, best, strict=True)] for _ in range(ROUNDS)]
        wide, eight = (statistics.median(column) for column in zip(*turns, strict=True))
        limit = pair[1].bytes / pair[0].bytes
        ratios.append(eight / wide)
        row = {"problem": pair[0].describe(), "us": [wide, eight], "limit": limit}
        rows.append(row | {"kernels": [config.describe() for config in best]})
        names = " / ".join(config.describe().replace("DEPENDENT_LAUNCH=none ", "") for config in best)
        print(
            f"| {pair[0].describe()} | {wide:.1f} | {eight:.1f} | {eight / wide:.3f} | {limit:.3f} | "
            f"{pair[1].bytes / eight / 1e3:.0f} | {names} |",
            flush=True,
        )
    print(f"{sum(ratio > 1.005 for ratio in ratios)} of {len(ratios)} slower; least ratio {min(ratios):.3f}")
    if words.json:
        words.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
