"""A Ray cluster as a fleet: the search stays here, compiles are tasks on any node, each GPU has an actor."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from evoattn.evaluation.workers import BaseWorker
from evoattn.fleet.base import MakeHandler
from evoattn.fleet.facts import facts_here, require_alike
from evoattn.fleet.ray_node import FindDevices, node_facts, packed
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import DetectedDevice, detect_devices

LOCAL = "local"
"""In place of an address: a cluster of this machine, which ends with the search."""

STORE_BYTES = 1 << 30
"""Shared memory of a local cluster: a candidate on its way takes some 200 KB."""
FREE_SECONDS = 60.0
"""A GPU whose actor has not started by then is taken by another program."""


class RayFleet:
    """Connects to a cluster, or starts one. `detect` comes first."""

    def __init__(
        self,
        address: str,
        jobs: int | None = None,
        size: Mapping[str, int] | None = None,
        find_devices: FindDevices = detect_devices,
    ) -> None:
        """`jobs`: compile tasks at once; None: one for each core that no GPU's actor has. `size`: `num_cpus` and
        `num_gpus` of a local cluster, this machine's unless given. `find_devices` is asked in each GPU's actor.

        Raises `FailedRun` where ray is not installed, or the cluster does not answer."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise FailedRun("--ray needs Ray; `pip install 'evoattn[ray]'` brings it.") from None
        where: dict[str, Any] = {"address": address}
        if address == LOCAL:
            where = {"address": LOCAL, "include_dashboard": False, "object_store_memory": STORE_BYTES, **(size or {})}
        try:
            ray.init(**where, log_to_driver=False, logging_level=logging.ERROR, namespace="evoattn")
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            said = " ".join(str(error).split())[:200]
            raise FailedRun(f"The Ray cluster {address!r} does not answer: {said}") from None
        self._ray, self._jobs, self._find_devices = ray, jobs, find_devices
        self._boards: list[Any] = []
        self.boards: tuple[str, ...] = ()

    @property
    def jobs(self) -> int:
        """Compile tasks at once."""
        cores = int(self._ray.cluster_resources().get("CPU", 1))
        return self._jobs or max(1, cores - len(self._boards))

    def detect(self) -> list[DetectedDevice]:
        """The cluster's free GPUs. Raises `NodeDiffers` if a node has another evoattn, compiler or template."""
        from evoattn.fleet.ray_worker import RayBoard

        self._require_alike()
        for board in self._boards:
            board.stop()
        count = int(self._ray.cluster_resources().get("GPU", 0))
        self._boards = [RayBoard() for _ in range(count)]
        asked = {board.actor.describe.remote(self._find_devices): board for board in self._boards}
        answered, _ = self._ray.wait([*asked], num_returns=count, timeout=FREE_SECONDS) if asked else ([], [])
        found = {asked[r]: device for r in asked if r in answered and (device := self._ray.get(r)) is not None}
        for board in {*asked.values()} - {*found}:
            board.stop()
        self._boards, devices = [*found], [*found.values()]
        self.boards = tuple(device.uuid or str(number) for number, device in enumerate(devices))
        if count and not devices:
            raise FailedRun(f"None of the {count} GPUs of the Ray cluster is free.")
        return devices

    def _require_alike(self) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ask = self._ray.remote(num_cpus=0)(node_facts)
        nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
        places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
        for name, facts in self._ray.get([ask.options(scheduling_strategy=place).remote() for place in places]):
            require_alike(name, facts, facts_here())

    def compilers(self, make_handler: MakeHandler, args: tuple[Any, ...], beside: bool = False) -> Sequence[BaseWorker]:
        """`jobs` workers, each for one compile task at a time on any node with a free core, in a process of Ray's."""
        from evoattn.fleet.ray_worker import RayCompiler

        return RayCompiler.pool(self.jobs, packed((make_handler, args, facts_here())))

    def devices(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> Sequence[BaseWorker]:
        """One worker for each GPU that the cluster lent, in the order of `boards`."""
        from evoattn.fleet.ray_worker import RayBoard

        words = packed((make_handler, args, facts_here()))
        for board in self._boards:
            board.begin(words)
        return RayBoard.several(self._boards)

    def referee(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> None:
        """None: an actor has its GPU to itself."""

    def stop(self) -> None:
        """End all actors and tasks of this search; a local cluster ends too."""
        self._ray.shutdown()
