"""Which list of kernels a card has: that of its owner's calibration, else one that ships."""

from __future__ import annotations

from functools import cache

from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.played import is_played
from evoattn.portfolio import calibrations
from evoattn.portfolio.kernels import KernelList, load


@cache
def list_for(gpu: GpuSpec) -> KernelList | None:
    """What a calibration of the card found, else `shipped_for`."""
    found = calibrations.of_card(gpu)
    return found.current_list() if found else shipped_for(gpu)


def shipped_for(gpu: GpuSpec) -> KernelList | None:
    """The list of the GPU's architecture, else of the newest older one that has a list, else of the oldest newer one;
    None where there is none."""
    if is_played(gpu):
        return None
    known = {g.arch: g.capability for g in GPUS.values()} | {gpu.arch: gpu.capability}
    older = sorted(
        (arch for arch in known if known[arch] <= gpu.capability), key=lambda arch: known[arch], reverse=True
    )
    newer = sorted((arch for arch in known if known[arch] > gpu.capability), key=lambda arch: known[arch])
    return next((one for one in map(load, (*older, *newer)) if one), None)
