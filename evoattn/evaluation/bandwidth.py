"""The memory bandwidth of a card that is not in the table, measured by a copy in a process of its own."""

from collections.abc import Callable
from dataclasses import replace

from evoattn.evaluation.process import Ending, Handler
from evoattn.evaluation.workers import Worker
from evoattn.model.gpu import MADE_ROW, DetectedDevice, GpuSpec

PROBE_SECONDS = 60.0
COPIES, L2_FOLD, MEMORY_SHARE = 10, 16, 0.2
"""Copies that are timed; bytes of one, as a multiple of L2, and at most this share of the card's memory."""
PLAUSIBLE = 0.3, 1.3
"""Of the bandwidth that the driver's clock and bus width give: what a probe may find."""


class CopyProbe(Handler):
    """Copies `task` bytes within the memory of device `index`; answers the GB/s read and written together."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __call__(self, task: int) -> float:
        import torch

        device = torch.device("cuda", self._index)
        source = torch.zeros(task, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        make_event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        start, end = make_event(enable_timing=True), make_event(enable_timing=True)
        with torch.cuda.device(device):
            target.copy_(source)
            start.record()
            for _ in range(COPIES):
                target.copy_(source)
            end.record()
            end.synchronize()
        return 2 * task * COPIES / (float(start.elapsed_time(end)) * 1e6)


def probed(spec: GpuSpec, device: DetectedDevice, probe: Callable[[int], Handler] = CopyProbe) -> GpuSpec:
    """The row of a card that is not in the table with its measured bandwidth, where the probe answers something
    plausible; any other row as it is."""
    if spec.note != MADE_ROW:
        return spec
    low, high = (share * spec.dram_gb_per_s for share in PLAUSIBLE)
    worker = Worker(probe, (device.index,))
    try:
        outcome = worker.ask(int(min(L2_FOLD * spec.l2_bytes, MEMORY_SHARE * spec.dram_bytes)), PROBE_SECONDS)
    finally:
        worker.stop()
    if outcome.ending is Ending.RESULT and low < outcome.value < high:
        return replace(spec, dram_gb_per_s=outcome.value)
    return spec
