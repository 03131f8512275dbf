"""From the words of `evoattn bench` to its rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from evoattn.bench.contenders import read_configs
from evoattn.bench.row import Row
from evoattn.bench.run import Bench
from evoattn.model import gpu as gpus
from evoattn.model.gpu import DetectedDevice, GpuError
from evoattn.model.named_problems import by_name_or_shape
from evoattn.search.request import choose_device
from evoattn.storage import Storage
from evoattn.timing.peers.labels import PEER_NAMES


def run_bench(
    texts: list[str],
    gpu: str,
    urls: list[str],
    configs: Path | None,
    top: int,
    jobs: int,
    progress: Console,
    devices: list[DetectedDevice] | None = None,
    make_bench: Callable[..., Bench] = Bench,
    peers: Collection[str] = PEER_NAMES,
    keep: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """The rows of the problems, by name or shape; as each ends, a line on `progress` and a call of `keep` with all so
    far. `peers`: of `PEER_NAMES`, those that are asked.

    `devices`: those of this machine unless given. Raises `GpuError` without a device of the named kind, `ProblemError`,
    `ConfigError`, `StorageError` or `WorkerFailed`.
    """
    wanted = list(dict.fromkeys(map(by_name_or_shape, texts)))
    devices = gpus.detect_devices() if devices is None else devices
    spec, device = choose_device(gpu, devices) if devices else (None, None)
    if spec is None or device is None:
        raise GpuError("There is no CUDA device here; `evoattn bench` times kernels, so run it where the GPU is.")
    from_file = {problem: read_configs(configs, problem, spec.arch) if configs else [] for problem in wanted}
    with ExitStack() as stack:
        storages = [Storage.open(url, create=i == 0) for i, url in enumerate(urls)]
        for storage in storages:
            stack.callback(storage.close)
        bench = make_bench(storages, spec, device, jobs, top, peers=peers)
        stack.callback(bench.close)
        rows = []
        for row in bench.run(wanted, from_file.__getitem__):
            rows.append(row)
            keep(rows)
            ratio = "no time" if row.ratio is None else f"{row.ratio:.3f} of the best peer"
            progress.print(f"{row.describe}: {ratio}", markup=False, soft_wrap=True)
        return rows
