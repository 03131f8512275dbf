"""One final on the device over what several tools found: their kernels and evoattn's peers take turns.

    python -m benchmarks.versus.final PROBLEM FOUND.json... --after 15 60

For each tool the best after each number of seconds, by its own times, as a user would have got it. All are checked
against the reference first, and run in the rounds of evoattn's own final. Prints µs by contestant, the fastest first.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.versus import found
from benchmarks.versus.found import Found, Tried
from evoattn.backends.compiler import compile_candidate
from evoattn.evaluation.device import DeviceEvaluator
from evoattn.evaluation.tasks import HoldFinal
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.families.render import render
from evoattn.model.gpu import GpuSpec, detect_devices
from evoattn.model.named_problems import by_name_or_shape
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.peers.table import Call, Peer, Tensors, peers_of
from evoattn.timing.protocol import FINAL


def chosen(runs: Sequence[Found], seconds: Sequence[float]) -> dict[str, tuple[str, Tried]]:
    """By name (tool and seconds): the kind and the best of each run so far. A config that stayed the best has one entry
    for all its seconds, but none for seconds behind the first that hold its tool's last try: the tool was not given
    them."""
    best: dict[str, tuple[str, Tried]] = {}
    for run in runs:
        by_config: dict[str, tuple[list[str], Tried]] = {}
        last = max((tried.at_s for tried in run.tried), default=0.0)
        enough = min((after for after in seconds if after >= last), default=math.inf)
        for after in seconds:
            if after <= enough and (tried := run.best_within(after)):
                by_config.setdefault(str(tried.config), ([], tried))[0].append(f"{after:g} s")
        best |= {f"{run.tool} after {', '.join(when)}": (run.kind, tried) for when, tried in by_config.values()}
    return best


def built(config: dict[str, Any], problem: AttentionProblem, gpu: GpuSpec) -> BuiltKernel:
    """A config of one of evoattn's families, compiled. Raises `CompileError`."""
    family, params = registry.lookup(config["family"]), KernelConfig(config["family"], config["params"])
    return BuiltKernel(family, params, gpu, compile_candidate(render(family, problem, params, gpu)))


def helion_peer(config: dict[str, Any]) -> Peer:
    """Helion's kernel with one of its configs."""

    def make(problem: AttentionProblem, tensors: Tensors) -> Call:
        from benchmarks.versus.helion_attention import call_of

        call: Call = call_of(problem.mask, tensors, config)
        return call

    return Peer(make, "helion")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", type=by_name_or_shape)
    parser.add_argument("found", nargs="+", type=Path)
    parser.add_argument("--after", nargs="+", type=float, default=[15.0, 60.0], metavar="SECONDS")
    options = parser.parse_args()
    devices = detect_devices()
    if not devices or devices[0].spec is None:
        sys.exit("There is no CUDA device that evoattn knows.")
    problem, gpu = options.problem, devices[0].spec
    best = chosen([found.read(path) for path in options.found], options.after)
    ours = {name: built(tried.config, problem, gpu) for name, (kind, tried) in best.items() if kind == "evoattn"}
    theirs = {name: helion_peer(tried.config) for name, (kind, tried) in best.items() if kind == "helion"}
    result = DeviceEvaluator(problem, gpu, peers=peers_of(problem) | theirs).final(HoldFinal(ours, FINAL))
    print(f"{problem.describe()} on {devices[0].describe()}")
    for name, timing in sorted(result.timings.items(), key=lambda item: item[1].median_us):
        said = timing.disqualified or timing.protocol.get("out", "")
        print(f"{timing.median_us:10.2f} µs  {name}  {said}")
    for name, sentence in result.refusals.items():
        print(f"{'-':>10}     {name}: {sentence}")


if __name__ == "__main__":
    main()
