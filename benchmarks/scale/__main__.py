"""Searches on one GPU, on two, four, on all GPUs of this host, and on all of them by Ray: who evaluates how many
candidates.

    python -m benchmarks.scale [--seconds 20] [--problems seed_h100,fa_d128_4k_causal,sampled]
                            [--modes one,two,four,all,ray] [--jobs N | --jobs-each N] [--kill 8]
                            [--sampler NAME] [--fake N] [--no-final] [-o rows.json]

`sampled` is the first problem that the workload of portfolios draws from a seed of its own. One GPU worker of each
search on several boards is ended by kill -9 on the way. Then the winners of a problem are timed in one final on the
first GPU. `--jobs` are the compile processes of each search, `--jobs-each` those for each GPU; without them one GPU has
all cores. A search takes its seconds, about 8 s to start and the final. `--fake` is a dry run with N made-up GPUs,
whose times mean nothing. With `--no-final` no search holds a final of its own, which saves ten seconds of each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.samplers.time_to_best import problems as sampled_problems
from benchmarks.samplers.time_to_best import shape as spelled
from evoattn.backends.compiler import compile_candidate
from evoattn.evaluation.handlers import DEVICE_SECONDS, DeviceHandler
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import HoldFinal
from evoattn.evaluation.workers import Worker
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.families.render import render
from evoattn.model.gpu import detect_devices
from evoattn.model.named_problems import lookup
from evoattn.model.paths import ROOT
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from evoattn.peers.labels import PEER_NAMES
from evoattn.timing.protocol import FINAL

SAMPLED = "sampled"
NEAR = 1.02
BOARDS = {"one": 1, "two": 2, "four": 4}
"""Of a mode; the others have all."""
SPARE_SECONDS = 90.0
"""What a search may take beyond its budget: the start, the peers, the final, the start of Ray."""


def shape_of(name: str) -> str:
    return spelled(sampled_problems(1)[0] if name == SAMPLED else lookup(name))


def searched(mode: str, name: str, given: argparse.Namespace, folder: Path) -> dict[str, Any] | None:
    """The row of one search; None where it failed, whose words are then printed."""
    command = [sys.executable, "-m", "benchmarks.scale.search", mode, shape_of(name), str(given.seconds)]
    command.append(str(folder / f"{mode}-{name}.db"))
    command += ["--fake", str(given.fake)] if given.fake else []
    command += ["--sampler", given.sampler] if given.sampler else []
    boards = BOARDS.get(mode) or given.fake or len(detect_devices())
    jobs = given.jobs_each * boards if given.jobs_each else given.jobs
    command += ["--jobs", str(jobs)] if jobs else []
    command += ["--no-final"] if given.no_final else []
    command += ["--kill", str(given.kill)] if mode != "one" and given.kill else []
    started = time.monotonic()
    try:
        folders = str(ROOT), os.environ.get("PYTHONPATH")  # for the nodes of Ray
        done = subprocess.run(
            command,
            text=True,
            capture_output=True,
            timeout=given.seconds + SPARE_SECONDS,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))},
        )
    except subprocess.TimeoutExpired:
        print(f"{mode} on {name} did not end in time.", flush=True)
        return None
    if done.returncode:
        print(f"{mode} on {name} failed: {done.stderr[-1500:]}", flush=True)
        return None
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    row |= {"problem": name, "wall": time.monotonic() - started}
    print(line(row), flush=True)
    return row


def line(row: dict[str, Any]) -> str:
    seconds, factors = max(row["seconds"], 1e-9), list(row["speeds"].values())
    spread = f", boards within {max(factors) / min(factors) - 1:.2%}" if factors else ""
    return (
        f"{row['problem']:<18} {row['mode']:<4} {row['boards']} boards, {row['jobs']} jobs: {row['recorded']} in "
        f"{seconds:.1f} s, {row['recorded'] / seconds:.1f}/s ({row['measured'] / seconds:.1f} measured), "
        f"busy {row['busy']:.0%}, driver {row['driver']:.0%} of a core, "
        f"sampler {row['sampler']:.0%}, compiling {row['compiling']:.0f}, ready {row['ready']:.0f}, "
        f"{row['writes'] / seconds:.0f} writes/s of {row['write_ms']:.2f} ms{spread}; "
        f"started in {row['starting']:.1f} s; killed {row['killed']}, twice {row['twice']}, "
        f"{row['states']}; best {row['family']} {row['best_us']:.2f} µs, {row['peer']} "
        f"{row['peer_us']:.2f} µs; {row['wall']:.0f} s in all"
    )


def near(row: dict[str, Any], best: float) -> float | None:
    """Seconds of the search until its best so far was within 2 % of `best`."""
    return next((seconds for seconds, us in row["improvements"] if us <= NEAR * best), None)


def final(name: str, rows: list[dict[str, Any]]) -> dict[str, float]:
    """By mode: the median in µs of its winner, all timed in turns on the first GPU."""
    problem, gpu = parse_shape(shape_of(name)), detect_devices()[0].spec
    assert gpu is not None
    kernels = {}
    for row in filter(lambda row: row["family"], rows):
        family, config = registry.lookup(row["family"]), KernelConfig(row["family"], row["config"])
        kernels[row["mode"]] = BuiltKernel(family, config, gpu, compile_candidate(render(family, problem, config, gpu)))
    worker = Worker(DeviceHandler, (problem, gpu, "warm"))
    try:
        outcome = worker.ask(HoldFinal(kernels, FINAL, tuple(PEER_NAMES)), 3 * DEVICE_SECONDS)
    finally:
        worker.stop()
    if outcome.ending is not Ending.RESULT:
        print(f"The final of {name} was not held: {outcome.value}", flush=True)
        return {}
    return {mode: timing.median_us for mode, timing in outcome.value.timings.items()}


def table(name: str, rows: list[dict[str, Any]], medians: dict[str, float]) -> list[str]:
    """What the searches of one problem come to, beside the one on one GPU."""
    best = min((us for row in rows for _, us in row["improvements"]), default=0.0)
    alone = next((row["recorded"] / row["seconds"] for row in rows if row["mode"] == "one"), None)
    lines = [f"{name}: mode | candidates/s | x one GPU | s to within 2 % | winner's µs in one final"]
    for row in rows:
        rate, seconds = row["recorded"] / row["seconds"], near(row, best)
        times, us = rate / alone if alone else None, medians.get(row["mode"])
        cells = [f"{rate:.1f}", times and f"{times:.2f}", seconds and f"{seconds:.1f}", us and f"{us:.2f}"]
        lines.append(f"  {row['mode']} | " + " | ".join(str(cell or "-") for cell in cells))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--problems", default=f"seed_h100,fa_d128_4k_causal,{SAMPLED}")
    parser.add_argument("--modes", default="one,two,all,ray")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--jobs-each", type=int)
    parser.add_argument("--sampler")
    parser.add_argument("--kill", type=float, default=8.0)
    parser.add_argument("--fake", type=int, default=0)
    parser.add_argument("--no-final", action="store_true")
    parser.add_argument("-o", "--output")
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    tables: list[str] = []
    with TemporaryDirectory() as folder:
        for name in given.problems.split(","):
            rows = [row for mode in given.modes.split(",") if (row := searched(mode, name, given, Path(folder)))]
            found += rows
            if given.output:
                Path(given.output).write_text(json.dumps(found))
            if rows:
                tables += table(name, rows, {} if given.fake else final(name, rows))
                print("\n".join(tables[-len(rows) - 1 :]), flush=True)
    print("\n".join(["", *tables]))
    return 0 if found else 1


if __name__ == "__main__":  # the final's worker imports this file again
    sys.exit(main())
