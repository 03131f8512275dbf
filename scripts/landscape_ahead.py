"""Compile random configs for `landscapes.py` ahead, on a machine without a GPU.

    python scripts/landscape_ahead.py FOLDER --only 'fp16 d64 full' --seconds 600 --jobs 2 [--card h100] [--target N…]
    tar -cJf ahead.tar.xz FOLDER    # then, where the GPU is: scripts/landscapes.py OUT --ahead FOLDER

FOLDER gets the machine code, and `ahead.jsonl` with a row per config: group, family and genes. A second run goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

from landscape_groups import make_groups
from landscape_surveyor import Surveyor

from evoattn.backends.compiler import CompileError, compile_source, version
from evoattn.backends.kernel_files import KernelFiles
from evoattn.families import registry
from evoattn.families.render import render
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.records import Candidate, CompiledKernel
from evoattn.portfolio.engine.kernel import Group, Kernel

LIST, KERNELS = "ahead.jsonl", "kernels"
Config = tuple[str, dict[str, Any]]


def configs_of(folder: Path) -> dict[str, list[Config]]:
    """By group, in the order compiled."""
    found: dict[str, list[Config]] = {}
    path = folder / LIST
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        found.setdefault(row["group"], []).append((row["family"], row["params"]))
    return found


def read(folder: Path, groups: list[Group], gpu: GpuSpec) -> tuple[dict[str, list[Config]], dict[str, CompiledKernel]]:
    """By group the configs whose machine code is that of today's sources, and the machine code by source."""
    files, listed = KernelFiles(folder / KERNELS, version()), configs_of(folder)
    configs: dict[str, list[Config]] = {}
    sources: dict[str, CompiledKernel] = {}
    for group in groups:
        for family, params in listed.get(group.name, []):
            candidate = _candidate(group, Kernel(family, params), gpu)
            if compiled := files.get(candidate):
                sources[candidate.source_hash] = compiled
                configs.setdefault(group.name, []).append((family, params))
    return configs, sources


def _candidate(group: Group, kernel: Kernel, gpu: GpuSpec) -> Candidate:
    return render(registry.lookup(kernel.family), group.problems[0], kernel.config, gpu)


def _compiled(candidate: Candidate) -> CompiledKernel | None:
    try:
        return replace(compile_source(candidate.source, candidate.arch), ptx="")  # nothing on the GPU's side reads it
    except CompileError:
        return None


def compile_for(
    folder: Path, groups: list[Group], targets: dict[str, int], gpu: GpuSpec, seconds: float, jobs: int
) -> int:
    """Draw valid configs for one problem of each group, and compile them until time is up; how many were kept.
    `targets`: the problem by group, else the first."""
    folder.mkdir(parents=True, exist_ok=True)
    files, known = KernelFiles(folder / KERNELS, version()), configs_of(folder)
    drawers = []
    for group in groups:
        group.kernels |= {k.id: k for k in (Kernel(f, p) for f, p in known.get(group.name, []))}
        drawers.append(Drawer(group, gpu, len(group.kernels), targets.get(group.name, 0)))
    turns = cycle(zip(groups, drawers, strict=True))
    end, count = time.monotonic() + seconds, 0
    running: dict[Future[CompiledKernel | None], tuple[Group, Kernel, Candidate]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool, (folder / LIST).open("a") as listed:
        while running or time.monotonic() < end:
            empty = 0  # groups in a row that have nothing left
            while len(running) < 2 * jobs and empty < len(groups) and time.monotonic() < end:
                group, drawer = next(turns)
                kernel = drawer.draw()
                empty = 0 if kernel else empty + 1
                if kernel:
                    candidate = _candidate(group, kernel, gpu)
                    running[pool.submit(_compiled, candidate)] = group, kernel, candidate
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                group, kernel, candidate = running.pop(done)
                if compiled := done.result():
                    count += 1
                    files.put(candidate, compiled)
                    row = {"group": group.name, "family": kernel.family, "params": kernel.params}
                    listed.write(json.dumps(row) + "\n")
                    listed.flush()
    return count


class Drawer(Surveyor):
    """Random valid configs for one problem."""

    def __init__(self, group: Group, gpu: GpuSpec, seed: int, target: int) -> None:
        super().__init__(group, gpu, seed)
        self._target = target

    def draw(self) -> Kernel | None:
        """A new config; None when nothing valid is left."""
        drawn = self._pool.draw()
        return Kernel(*drawn, "random") if drawn else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="groups whose names begin so; several with commas")
    parser.add_argument("--target", type=int, nargs="*", default=[], help="of each of these groups, by its number")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--card", choices=sorted(GPUS), default="h100")
    words = parser.parse_args()
    gpu = GPUS[words.card]
    groups = make_groups(gpu, only=words.only)
    targets = dict(zip((g.name for g in groups), words.target, strict=False))
    count = compile_for(words.folder, groups, targets, gpu, words.seconds, words.jobs)
    print(f"{count} kernels compiled; {[len(found) for found in configs_of(words.folder).values()]} in all")


if __name__ == "__main__":
    main()
