"""What a search runs on: the GPUs that its words name here, or those of a Ray cluster."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from evoattn.fleet.base import Fleet, LocalFleet, visible_as
from evoattn.model.gpu import DetectedDevice, detect_devices
from evoattn.search.request import SearchPlan, SearchWords, require_alike


@dataclass(frozen=True)
class Machines:
    """`devices` are all that there are; `cluster` is None for a search by processes of this machine."""

    devices: list[DetectedDevice]
    cluster: Fleet | None = None

    def fleet(self, words: SearchWords, plan: SearchPlan) -> Fleet:
        """For a search of this plan."""
        if self.cluster:
            return self.cluster
        if not plan.boards:  # none was asked for by its number: the first that CUDA shows
            return LocalFleet(words.processes)
        names = [board.uuid or str(board.index) for board in plan.boards]
        return LocalFleet(words.processes, names, [visible_as(board.index) for board in plan.boards])


@contextmanager
def machines_of(words: SearchWords) -> Iterator[Machines]:
    """Those that the words name, until the context ends. Raises `WrongUse` or `FailedRun` where Ray cannot be used."""
    if words.ray is None:
        yield Machines(detect_devices())
        return
    from evoattn.fleet.ray_fleet import RayFleet

    fleet = RayFleet(words.ray, words.jobs)
    try:
        devices = fleet.detect()
        require_alike(devices)
        yield Machines(devices, fleet)
    finally:
        fleet.stop()
