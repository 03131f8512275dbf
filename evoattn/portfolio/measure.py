"""A measuring campaign on the GPU that is here: problems drawn as people have them are searched all at once, and all
times are kept."""

import json
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evoattn.engine.group_search import GroupSearch
from evoattn.engine.groups import Group
from evoattn.engine.tools import Tools
from evoattn.fleet.base import LocalFleet
from evoattn.model.gpu import DetectedDevice, GpuSpec
from evoattn.portfolio import campaign
from evoattn.portfolio.proposals import ClimbingBreeder
from evoattn.portfolio.workload import BUILD_SEEDS, PLAIN, drawn

SAVE_SECONDS = 30.0
"""Between two saves."""
SAY_SECONDS = 20.0
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
    jobs: int | None = None
    """Compile processes."""

    def groups(self, gpu: GpuSpec) -> list[Group]:
        """Of as many problems of each kind and seed as make up the number."""
        each = math.ceil(self.count / (len(self.kinds) * len(self.seeds)))
        return campaign.make_groups(drawn(self.kinds, self.seeds, each), gpu, self.count)


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


def measure(wanted: Wanted, device: DetectedDevice, say: Say, tools: Tools | None = None) -> None:
    """Search and save. `tools`: what the processes run, where it is not the usual. Raises `OSError` where the file
    cannot be written."""
    gpu = device.spec
    assert gpu is not None  # or there would be no device
    groups = wanted.groups(gpu)
    say(f"{len(groups)} groups, {sum(len(g.problems) for g in groups)} problems")
    fleet = LocalFleet(wanted.jobs) if wanted.jobs else None
    with GroupSearch(groups, gpu, ClimbingBreeder, fleet, tools) as engine:

        def save() -> None:
            about = {
                "device": device.product,
                "driver": device.driver,
                "host": platform.node(),
                "seconds": wanted.seconds,
                "measured": engine.measured,
                "compiled": engine.compiled,
            }
            campaign.save(wanted.output, groups, about, {})

        engine.run(wanted.seconds, Progress(engine, say, save))
        save()
        say(f"searched; {engine.measured} times, {engine.compiled} compiled")
    for group in groups:
        bad = Counter(k.state[:60] for k in group.kernels.values() if k.state != "right")
        say(f"{group.name}: {len(group.kernels)} kernels {json.dumps(bad.most_common(3))}")
