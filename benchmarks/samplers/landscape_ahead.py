"""Compile random configs for `landscapes.py` ahead, on a machine without a GPU.

    python -m benchmarks.samplers.landscape_ahead FOLDER --only 'fp16 d64 full' --seconds 600 --jobs 2
            [--card h100] [--target N…]
    tar -cJf ahead.tar.xz FOLDER    # then, where the GPU is: benchmarks.samplers.landscapes OUT --ahead FOLDER

FOLDER gets the machine code, and `ahead.jsonl` with a row per config: group, family and genes. A second run goes on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.samplers.landscape_groups import make_groups
from benchmarks.samplers.landscape_surveyor import Surveyor
from evoattn.backends.compiler import version
from evoattn.backends.kernel_files import KernelFiles
from evoattn.engine.groups import Group, Kernel
from evoattn.engine.planned import Ahead, Planned
from evoattn.families import registry
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.space import KernelConfig
from evoattn.portfolio.measure import compile_ahead

LIST, KERNELS, RANDOM = "ahead.jsonl", "kernels", "random"
Config = tuple[str, dict[str, Any]]


def configs_of(folder: Path) -> dict[str, list[Config]]:
    """By group, in the order compiled."""
    found: dict[str, list[Config]] = {}
    path = folder / LIST
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        found.setdefault(row["group"], []).append((row["family"], row["params"]))
    return found


def read(folder: Path, groups: list[Group], gpu: GpuSpec) -> Ahead:
    """What was compiled for the groups, to be timed on the first problem that it serves and others."""
    listed, planned = configs_of(folder), []
    for group in groups:
        for name, params in listed.get(group.name, []):
            family, config = registry.lookup(name), KernelConfig(name, params)
            able = (i for i, problem in enumerate(group.problems) if not family.why_invalid(problem, config, gpu))
            if (target := next(able, None)) is not None:
                planned.append(Planned(group, name, params, target, RANDOM))
    return Ahead(planned, KernelFiles(folder / KERNELS, version()), gpu)


def compile_for(
    folder: Path, groups: list[Group], targets: dict[str, int], gpu: GpuSpec, seconds: float, jobs: int
) -> int:
    """Draw valid configs for one problem of each group, and compile them until time is up; how many were kept.
    `targets`: the problem by group, else the first."""
    folder.mkdir(parents=True, exist_ok=True)
    files, known, count = KernelFiles(folder / KERNELS, version()), configs_of(folder), 0
    drawers = []
    for group in groups:
        group.kernels |= {k.id: k for k in (Kernel(f, p) for f, p in known.get(group.name, []))}
        drawers.append(Drawer(group, gpu, len(group.kernels), targets.get(group.name, 0)))
    with (folder / LIST).open("a") as listed:
        for one in compile_ahead(in_turns(drawers), files, gpu, seconds, jobs):
            count += 1
            listed.write(json.dumps({"group": one.group.name, "family": one.family, "params": one.params}) + "\n")
            listed.flush()
    return count


class Drawer(Surveyor):
    """Random valid configs for one problem."""

    def __init__(self, group: Group, gpu: GpuSpec, seed: int, target: int) -> None:
        super().__init__(group, gpu, seed)
        self._target = target

    def draw(self) -> Planned | None:
        """A new config; None when nothing valid is left."""
        drawn = self._pool.draw()
        return Planned(self._group, *drawn, self._target, RANDOM) if drawn else None


def in_turns(drawers: Sequence[Drawer]) -> Iterator[Planned]:
    """A config of each until none has any left."""
    drawn = True
    while drawn:
        drawn = False
        for drawer in drawers:
            if one := drawer.draw():
                drawn = True
                yield one


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
