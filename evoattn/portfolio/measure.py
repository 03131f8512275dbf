"""A measuring campaign on the GPU that is here: problems drawn as people have them are searched all at once, then the
best kernels of each group are timed in turns on its problems.

It may follow a plan: the campaign's problems and what is to be tried first on each, compiled on a machine without a
GPU.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import platform
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from evoattn.backends.compiler import CompileError, compile_source, version
from evoattn.backends.kernel_files import KernelFiles
from evoattn.engine.group_search import GroupSearch, Manner
from evoattn.engine.groups import Group, Kernel
from evoattn.engine.planned import Ahead, Planned
from evoattn.engine.tools import Tools
from evoattn.fleet.local import LocalFleet
from evoattn.model.gpu import DetectedDevice, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CompiledKernel
from evoattn.portfolio import campaign
from evoattn.portfolio.proposals import ClimbingBreeder
from evoattn.portfolio.workload import BUILD_SEEDS, PLAIN, drawn
from evoattn.timing.protocol import ORDER

SAVE_SECONDS = 30.0
"""Between two saves."""
SAY_SECONDS = 20.0
DRAWN_EACH = 400
"""Problems of each kind and seed, of which those are measured that are emphasised; else as many of each kind and seed
as make up the number."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Wanted:
    """What a campaign is to measure."""

    output: Path
    """Where its file goes, `.jsonl.gz`."""
    seconds: float = 360.0
    """Of search."""
    count: int = 600
    """Problems in all."""
    kinds: Sequence[str] = (PLAIN,)
    """Of `workload.DRAWS`."""
    seeds: range = BUILD_SEEDS
    emphasis: bool = False
    """More of the problems on which picks lose most."""
    after: Sequence[Path] = ()
    """Earlier campaigns: what their final tables have is left out, and their searches' times are taken over."""
    share: tuple[int, int] = (0, 1)
    """The part of the groups that this process measures, and how many parts there are."""
    near: int = 12
    """Problems at most that a promising kernel is timed on."""
    jobs: int | None = None
    """Compile processes."""
    ahead: Path | None = None
    """A folder with a plan: its problems are measured, and its compiled kernels are timed while no other waits."""
    final_seconds: float = 0.0
    """Of final tables: of each group the best `most` kernels are timed in turns on its problems."""
    most: int = 24
    rounds: int = 3
    """Of final tables and peers."""
    peers: tuple[str, ...] = ()
    """Timed beside the best kernels at last, for `peers_seconds`."""
    peers_seconds: float = 30.0

    def groups(self, gpu: GpuSpec) -> list[Group]:
        """Raises `OSError` where an earlier campaign cannot be read."""
        each = DRAWN_EACH if self.emphasis else math.ceil(self.count / (len(self.kinds) * len(self.seeds)))
        problems = drawn(self.kinds, self.seeds, each)
        groups = campaign.make_groups(problems, self.after, gpu, self.count, self.emphasis)
        part, parts = self.share
        return campaign.shares(groups, parts)[part]


class Progress:
    """Says what the search has done, each SAY_SECONDS at most, and saves it, each SAVE_SECONDS."""

    def __init__(self, engine: GroupSearch, say: Say, save: Callable[[], None]) -> None:
        self._engine, self._say, self._save = engine, say, save
        self._said = self._saved = time.monotonic()

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._saved > SAVE_SECONDS:
            self._saved = now
            self._save()
        if now - self._said <= SAY_SECONDS:
            return
        self._said = now
        kernels = [k for g in self._engine.groups for k in g.kernels.values()]
        states = Counter(k.state.split(":")[0] for k in kernels)
        self._say(
            f"{len(kernels)} kernels {dict(states)}, {self._engine.compiled} compiled, "
            f"{self._engine.measured} times, GPU busy {self._engine.busy_seconds:.0f} s"
        )


def _timed_at_last(wanted: Wanted, engine: GroupSearch, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The final tables, saved each SAVE_SECONDS at most while they grow."""
    saved, table = time.monotonic(), dict[str, Any]()
    finals = final_tables(engine, wanted.most, wanted.rounds, wanted.final_seconds)
    for table in finals if wanted.final_seconds > 0 else ():
        if time.monotonic() - saved > SAVE_SECONDS:
            saved = time.monotonic()
            save(table)
    save(table)
    return table


def measure(wanted: Wanted, device: DetectedDevice, say: Say, tools: Tools | None = None) -> None:
    """Search, time at last, and save. `tools`: what the processes run, where it is not the usual. Raises `OSError`
    where a file cannot be read or written."""
    gpu = device.spec
    assert gpu is not None  # or there would be no device
    ahead: Ahead | None = None
    if wanted.ahead:
        groups, planned = load_plan(wanted.ahead / PLAN)
        ahead = Ahead(planned, KernelFiles(wanted.ahead / KERNELS, version()), gpu)
        say(f"{ahead.left} of {len(planned)} planned kernels are compiled")
    else:
        groups = wanted.groups(gpu)
    say(f"{len(groups)} groups, {sum(len(g.problems) for g in groups)} problems")
    fleet = LocalFleet(wanted.jobs) if wanted.jobs else None
    manner = Manner(ClimbingBreeder, most=wanted.near, ahead=ahead)
    with GroupSearch(groups, gpu, manner, fleet, tools) as engine:

        def save(table: dict[str, Any]) -> None:
            about = {
                "device": device.product,
                "driver": device.driver,
                "host": platform.node(),
                "seconds": wanted.seconds,
                "measured": engine.measured,
                "compiled": engine.compiled,
            }
            campaign.save(wanted.output, groups, about, table)

        engine.run(wanted.seconds, Progress(engine, say, lambda: save({})))
        save({})
        left = f", {ahead.left} ahead were not timed" if ahead else ""
        say(f"searched; {engine.measured} times, {engine.compiled} compiled{left}")
        table = _timed_at_last(wanted, engine, save)
        if wanted.peers:
            table = with_peers(engine, table, wanted.peers, wanted.rounds, wanted.peers_seconds)
            save(table)
            say("peers")
    for group in groups:
        bad = Counter(k.state[:60] for k in group.kernels.values() if k.state != "right")
        final = len((table.get(group.name) or {}).get("kernels", []))
        say(f"{group.name}: {len(group.kernels)} kernels {json.dumps(bad.most_common(3))}, {final} in the final table")


SPLITS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of splits that every kernel of split_kv and latent_wgmma is timed with: they cost no compile."""


def with_splits(kernels: list[Kernel], group: Group, engine: GroupSearch) -> list[Kernel]:
    """The kernels, and every number of splits that costs no other compile."""
    found = {k.id: k for k in kernels}
    for kernel in kernels:
        if "SPLITS" not in kernel.params or kernel.params.get("MERGE") == "cluster":
            continue
        for splits in SPLITS:
            other = Kernel(kernel.family, kernel.params | {"SPLITS": splits}, "splits", "right", kernel.registers)
            if engine.serves(group, other):
                found.setdefault(other.id, group.kernels.setdefault(other.id, other))
    return list(found.values())


def in_turn(groups: Sequence[Group]) -> list[tuple[Group, int]]:
    """Every problem of every group as (group, index), in an order that is broken off anywhere with an equal share of
    each group's problems done, drawn at random within a group."""
    order: list[tuple[float, Group, int]] = []
    for group in groups:
        indexes = list(range(len(group.problems)))
        random.Random(group.name).shuffle(indexes)
        order += [((place + 1) / len(indexes), group, index) for place, index in enumerate(indexes)]
    return [(group, index) for _, group, index in sorted(order, key=lambda entry: entry[0])]


def final_tables(engine: GroupSearch, most: int, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """{group: {"kernels": [id], "us": [[µs by kernel] by problem]}} of `most` contenders,
    timed in turns on the problems of their group; yielded again and again as rows fill. After `seconds` the problems
    that are left keep rows of None."""
    end = time.monotonic() + seconds
    chosen: dict[str, list[Kernel]] = {}
    for group in engine.groups:
        chosen[group.name] = with_splits(campaign.contenders(group, most), group, engine)
    engine.compile_all([(g, k) for g in engine.groups for k in chosen[g.name]])
    able = {g.name: {k.id: set(engine.serves(g, k)) for k in chosen[g.name]} for g in engine.groups}
    table: dict[str, Any] = {}
    for group in engine.groups:
        ids = [k.id for k in chosen[group.name]]
        table[group.name] = {"kernels": ids, "us": [[None] * len(ids) for _ in group.problems]}
    for group, index in in_turn(engine.groups):
        if time.monotonic() > end:
            break
        valid = [k for k in chosen[group.name] if index in able[group.name][k.id]]
        times = engine.final(group, index, valid, replace(ORDER, samples=rounds)).right_us
        table[group.name]["us"][index] = [times.get(k.id) for k in chosen[group.name]]
        yield table
    yield table


def with_peers(
    engine: GroupSearch, table: dict[str, Any], peers: tuple[str, ...], rounds: int, seconds: float
) -> dict[str, Any]:
    """The table, and of each group `peers`: {index: {"ours": µs, name: µs}} of its fastest kernel on a problem and of
    the peers whose answers are right there, in turns, on as many problems as there is time for."""
    end = time.monotonic() + seconds
    found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in table}
    for group, index in in_turn(engine.groups):
        if time.monotonic() > end:
            break
        row = [
            (us, name)
            for name, us in zip(table[group.name]["kernels"], table[group.name]["us"][index], strict=True)
            if us
        ]
        if row:
            best = group.kernels[min(row)[1]]
            times = engine.final(group, index, [best], replace(ORDER, samples=rounds), peers).right_us
            if ours := times.pop(best.id, None):
                found[group.name][str(index)] = {"ours": ours} | times
    return {name: row | {"peers": found[name]} for name, row in table.items()}


PLAN, KERNELS = "plan.json", "kernels"
"""Of a plan's folder: the file, and the folder of machine code."""


def plan(groups: Iterable[Group], gpu: GpuSpec, seed: int = 0) -> list[Planned]:
    """What a breeder proposes first for each problem (`ClimbingBreeder.steps`): the first of every problem, then the
    second, and so on; of equal configs of a group the first alone."""
    rows = []
    for group in groups:
        breeder = ClimbingBreeder(group, gpu, seed)
        for target in range(len(group.problems)):
            steps = breeder.steps(target)
            rows.append([Planned(group, config.family, config.params, target, origin) for config, origin in steps])
    found = dict[tuple[str, str], Planned]()
    for turn in zip_longest(*rows):
        for one in filter(None, turn):
            found.setdefault((one.group.name, one.kernel().id), one)
    return list(found.values())


def compile_ahead(
    planned: Iterator[Planned], files: KernelFiles, gpu: GpuSpec, seconds: float, jobs: int
) -> Iterator[Planned]:
    """Compile what is planned into `files`, in its order, until `seconds` are over and `jobs` processes have ended what
    they had begun. Yields what has machine code, as it is ready; what does not compile is left out."""
    end = time.monotonic() + seconds
    running: dict[Future[CompiledKernel | None], tuple[Planned, Candidate]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        while True:
            while len(running) < 2 * jobs and time.monotonic() < end and (one := next(planned, None)):
                candidate = one.candidate(gpu)
                if files.has(candidate):
                    yield one
                else:
                    running[pool.submit(_compiled, candidate)] = one, candidate
            if not running:
                return
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                one, candidate = running.pop(done)
                if compiled := done.result():
                    files.put(candidate, compiled)
                    yield one


def _compiled(candidate: Candidate) -> CompiledKernel | None:
    try:
        return replace(compile_source(candidate.source, candidate.arch), ptx="")  # nothing on the GPU's side reads it
    except CompileError:
        return None


def save_plan(path: Path, planned: Iterable[Planned]) -> None:
    """The groups' problems, and the kernels in their order."""
    planned = list(planned)
    groups = {one.group.name: [problem.to_dict() for problem in one.group.problems] for one in planned}
    kernels = [[one.group.name, one.family, one.params, one.target, one.origin] for one in planned]
    path.write_text(json.dumps({"groups": groups, "kernels": kernels}), encoding="utf-8")


def load_plan(path: Path) -> tuple[list[Group], list[Planned]]:
    """What `save_plan` wrote. A group has a share of the time by its number of problems. Raises `OSError`."""
    found = json.loads(path.read_text(encoding="utf-8"))
    groups = {}
    for name, rows in found["groups"].items():
        problems = [AttentionProblem(**row) for row in rows]
        families = tuple(dict.fromkeys(family for group, family, *_ in found["kernels"] if group == name))
        groups[name] = Group(name, problems, families, len(problems))
    return list(groups.values()), [Planned(groups[name], *words) for name, *words in found["kernels"]]
