"""A measuring campaign on the GPU that is here: problems drawn as people have them are searched all at once, then the
best kernels of each group are timed in turns on its problems."""

from __future__ import annotations

import json
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evoattn.backends.compiler import version
from evoattn.backends.kernel_files import KernelFiles
from evoattn.engine.group_search import GroupSearch, Manner
from evoattn.engine.groups import Group
from evoattn.engine.planned import Ahead
from evoattn.engine.tools import Tools
from evoattn.fleet.local import LocalFleet
from evoattn.model.gpu import DetectedDevice, GpuSpec
from evoattn.portfolio import campaign, plan
from evoattn.portfolio.climbing import ClimbingBreeder
from evoattn.portfolio.final_table import final_tables, with_peers
from evoattn.portfolio.workload import BUILD_SEEDS, PLAIN, drawn

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
    """A folder of `plan.py`: its problems are measured, and its compiled kernels are timed while no other waits."""
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
        groups, planned = plan.load(wanted.ahead / plan.PLAN)
        ahead = Ahead(planned, KernelFiles(wanted.ahead / plan.KERNELS, version()), gpu)
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
