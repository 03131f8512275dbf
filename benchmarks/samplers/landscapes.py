"""Record landscapes on the GPU that is here: the times of many configs, good and bad, on problems of several kinds.

    python -m benchmarks.samplers.landscapes OUT.jsonl.gz [--seconds 440] [--only GROUP] [--without FAMILY]
            [--after EARLIER…]
        [--wanted 2000] [--each 4 3] [--ahead FOLDER]

Half of the configs are random, half are bred from the best. Each compiled kernel is checked, then timed on the problems
of its group. At the end the fastest tenth of each problem is timed a second time. What was found is written every 20
seconds. With --after, the recording goes on from earlier files: what they hold is bred from and not tried again, but
for some of their fastest. With --wanted, the compile processes serve the groups one after another, each until its
problems have so many right configs. With --each, of each group only so many problems are timed, those of which most is
known. --ahead: configs of `benchmarks/samplers/landscape_ahead.py`. `evoattn.cost.landscapes.py` says what the rows
hold.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.samplers import landscape_ahead
from benchmarks.samplers.landscape_groups import make_groups
from benchmarks.samplers.landscape_surveyor import Aim, Surveyor, take_turns
from evoattn.cost import landscapes as landscape
from evoattn.cost.landscapes import append
from evoattn.engine.group_search import GroupSearch, Manner
from evoattn.engine.groups import Group, Kernel
from evoattn.families import registry
from evoattn.fleet.local import LocalFleet
from evoattn.model.gpu import GpuSpec, detect_devices
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import load_space
from evoattn.storage.versions import collect

TOP_SHARE = 0.1
"""Of each problem's kernels: timed a second time."""
AGAIN_SECONDS_SHARE = 0.1
SAVE_SECONDS, COUNT_SECONDS = 20.0, 2.0
COMMON = 6
"""Of each problem's fastest kernels of earlier files: timed anew, as boards differ (`landscape.load`)."""


class Record:
    """The file, and what is in it already."""

    def __init__(self, path: Path, about: dict[str, Any], groups: list[Group], gpu: GpuSpec) -> None:
        self._path, self._groups, self._gpu = path, groups, gpu
        self._numbers: dict[tuple[str, str], int] = {}
        self._earlier = {(g.name, identity) for g in groups for identity in g.kernels}
        path.unlink(missing_ok=True)
        spaces = [load_space(family, gpu) for family in sorted({f for g in groups for f in g.families})]
        genes = {space.family: {p.name: list(p.values) for p in space.parameters} for space in spaces}
        append(path, [{"about": about, "genes": genes}])
        append(path, [{"group": g.name, "problems": [p.to_dict() for p in g.problems]} for g in groups])

    def save(self) -> None:
        """Write the kernels that are done and not written yet."""
        rows = []
        for group in self._groups:
            for kernel in group.kernels.values():
                key = group.name, kernel.id
                if kernel.state != "new" and key not in self._earlier and key not in self._numbers:
                    self._numbers[key] = len(self._numbers)
                    rows.append(self._row(group, kernel))
        append(self._path, rows)

    def _row(self, group: Group, kernel: Kernel) -> dict[str, Any]:
        family = registry.lookup(kernel.family)
        valid = [i for i, p in enumerate(group.problems) if not family.why_invalid(p, kernel.config, self._gpu)]
        return {
            "kernel": self._numbers[group.name, kernel.id],
            "of": group.name,
            "family": kernel.family,
            "params": [kernel.params[name] for name in load_space(kernel.family, self._gpu).names()],
            "origin": kernel.origin,
            "state": kernel.state[:160],
            "registers": kernel.registers,
            "spills": kernel.spill_bytes,
            "compile_s": round(kernel.compile_seconds, 3),
            "device_s": round(kernel.device_seconds, 4),
            "us": {i: float(f"{us:.5g}") for i, us in sorted(kernel.times.items())},
            "rough": sorted(kernel.rough),
            "valid": valid,
        }

    def has(self, group: Group, kernel: Kernel) -> bool:
        """Whether the kernel is in this file, not in an earlier one."""
        return (group.name, kernel.id) in self._numbers

    def save_again(self, group: Group, kernel: Kernel, us: dict[int, float]) -> None:
        """Write a second measurement."""
        rounded = {i: float(f"{t:.5g}") for i, t in us.items()}
        append(self._path, [{"kernel": self._numbers[group.name, kernel.id], "again": rounded}])


def time_the_best_again(engine: GroupSearch, record: Record, end: float, rng: random.Random) -> list[float]:
    """Second times over first ones, of the fastest tenth of each problem, until `end` by `time.monotonic`."""
    wanted: dict[tuple[str, str], tuple[Group, Kernel, list[int]]] = {}
    for group in engine.groups:
        for index in range(len(group.problems)):
            timed = sum(index in k.times for k in group.kernels.values())
            for kernel in filter(partial(record.has, group), group.leaders(index, int(TOP_SHARE * timed) + 1)):
                wanted.setdefault((group.name, kernel.id), (group, kernel, []))[2].append(index)
    ratios = []
    shuffled = list(wanted.values())
    rng.shuffle(shuffled)
    for group, kernel, indexes in shuffled:
        if time.monotonic() > end:
            break
        again = engine.time_again(group, kernel, indexes)
        ratios += [us / kernel.times[i] for i, us in again.items()]
        record.save_again(group, kernel, again)
    print(f"{len(ratios)} of {sum(len(i) for _, _, i in shuffled)} second times", flush=True)
    return ratios


def survey(
    engine: GroupSearch, record: Record, seconds: float, seed: int = 0, count: Callable[[], None] = lambda: None
) -> None:
    """Search, save as it goes, time the best again, and say what came of it. `count` is called every two seconds."""
    begun = said = counted = time.monotonic()

    def refresh() -> None:
        nonlocal said, counted
        if time.monotonic() - counted > COUNT_SECONDS:
            counted = time.monotonic()
            count()
        if time.monotonic() - said < SAVE_SECONDS:
            return
        said = time.monotonic()
        record.save()
        states = Counter(k.state.split(":")[0] for g in engine.groups for k in g.kernels.values())
        print(
            f"{said - begun:5.0f} s: {dict(states)}, {engine.compiled} compiles, {engine.measured} times, GPU busy "
            f"{engine.busy_seconds:.0f} s",
            flush=True,
        )

    engine.run(seconds * (1 - AGAIN_SECONDS_SHARE), refresh)
    record.save()
    end = time.monotonic() + seconds * AGAIN_SECONDS_SHARE
    ratios = time_the_best_again(engine, record, end, random.Random(seed))
    if len(ratios) > 1:
        off = [abs(r - 1) for r in ratios]
        print(f"second times differ by {median(off):.2%} in the median, {quantiles(off, n=20)[18]:.2%} at 95 %")
    for group in engine.groups:
        right = [k for k in group.kernels.values() if k.state == "right"]
        counts = [sum(i in k.times for k in right) for i in range(len(group.problems))]
        rough = sum(len(k.rough) for k in right) / max(1, sum(counts))
        families = dict(Counter(k.family for k in right))
        print(f"{group.name}: right per problem {counts}, rough {rough:.0%}, {families}")
        bad = Counter(k.state[:60] for k in group.kernels.values() if k.state not in ("right", "new"))
        print(f"   not right: {bad.most_common(3)}")


def go_on_from(groups: list[Group], paths: list[Path], most: int) -> dict[str, dict[int, int]]:
    """Put the kernels of earlier files into their groups, with the problems that they were timed on, the first `most`
    of a group: by group and problem the right configs that a search could propose. The fastest of each problem are to
    be timed anew."""
    by_name = {g.name: g for g in groups}
    right: dict[str, dict[int, int]] = {g.name: {} for g in groups}
    common: dict[str, dict[str, Kernel]] = {g.name: {} for g in groups}
    for one in landscape.load(*paths):
        group = by_name.get(one.group)
        if group is None or one.index >= most:
            continue
        group.problems[one.index : one.index + 1] = [one.problem]
        timed = sorted((c for c in one.configs if c.best_us is not None), key=lambda c: c.best_us or 0.0)
        right[group.name][one.index] = len(timed)
        common[group.name] |= {k.id: k for k in (Kernel(c.family, c.params) for c in timed[:COMMON])}
        for config in (*one.configs, *one.elsewhere):
            made = Kernel(config.family, config.params, config.origin, config.state)
            kernel = group.kernels.setdefault(made.id, made)
            if config.best_us is not None:
                kernel.times[one.index] = config.best_us
                kernel.rough |= {one.index} if config.rough else set()
        group.spent = float(len(group.kernels))
    for group in groups:
        for name, kernel in common[group.name].items():
            del group.kernels[name]
            group.given.append((kernel.family, kernel.params))
    return right


def make_aim(group: Group, right: dict[int, int], each: int, wanted: int) -> Aim:
    """The problems of which most is known, or the first where nothing is."""
    problems = sorted(range(len(group.problems)), key=lambda i: -right.get(i, 0))[:each]
    return Aim(tuple(sorted(problems)), wanted, right)


def about(gpu: GpuSpec, versions: dict[str, str], problems: list[AttentionProblem]) -> dict[str, Any]:
    """What the first row says."""
    return {"gpu": gpu.name, "saved": time.strftime("%Y-%m-%d"), "problems": len(problems)} | versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=440, help="once the processes are up, all in all")
    parser.add_argument("--only", default="", help="groups whose names begin so; several with commas")
    parser.add_argument("--problems", type=int, default=8, help="at most so many of a group")
    parser.add_argument("--without", nargs="*", default=[], help="families, e.g. that cannot be compiled here")
    parser.add_argument("--after", type=Path, nargs="*", default=[])
    parser.add_argument("--wanted", type=int, default=0, help="right configs of a problem")
    parser.add_argument("--each", type=int, nargs="*", default=[], help="of each group so many problems are timed")
    parser.add_argument("--ahead", type=Path, help="folder with configs that are compiled already")
    parser.add_argument("--jobs", type=int, help="compile processes")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    device = detect_devices()[0]
    gpu = device.spec
    assert gpu is not None, f"evoattn has no row of {device.product}"
    groups = make_groups(gpu, words.problems, words.only)
    right = go_on_from(groups, words.after, words.problems)
    for group in groups:
        group.families = tuple(f for f in group.families if f not in words.without)
        print(group.name, group.families, *(f"\n    {p.describe()}" for p in group.problems))
    record = Record(words.output, about(gpu, collect(device), [p for g in groups for p in g.problems]), groups, gpu)
    ahead = landscape_ahead.read(words.ahead, groups, gpu) if words.ahead else None
    print(ahead.left if ahead else 0, "compiled ahead", flush=True)
    surveyors: dict[str, Surveyor] = {}

    each = dict(zip((g.name for g in groups), words.each, strict=False))

    def breeder(group: Group, gpu: GpuSpec, seed: int) -> Surveyor:
        aim = make_aim(group, right[group.name], each.get(group.name, len(group.problems)), words.wanted)
        surveyors[group.name] = Surveyor(group, gpu, seed, aim)
        return surveyors[group.name]

    manner = Manner(breeder, words.seed, sample=99, most=99, ahead=ahead)
    with GroupSearch(groups, gpu, manner, LocalFleet(words.jobs) if words.jobs else None) as engine:
        survey(engine, record, words.seconds, words.seed, partial(take_turns, groups, surveyors, words.wanted))


if __name__ == "__main__":
    main()
