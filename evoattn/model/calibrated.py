"""Where what was measured on the user's own cards lies."""

import re
from pathlib import Path

from evoattn.model.gpu_table import GpuSpec
from evoattn.model.paths import data_folder

FOLDER, FILE = "calibrations", "calibration.json"


def calibrations_folder() -> Path:
    """A folder for each card; it need not exist."""
    return data_folder() / FOLDER


def calibration_name(name: str, sm_count: int, arch: str) -> str:
    """What a card is called there, e.g. `l4-58-sm_89`."""
    return f"{re.sub(r'[^a-z0-9._-]', '_', name.lower()).lstrip('.')}-{sm_count}-{arch}"


def calibration_folder(gpu: GpuSpec) -> Path:
    """Of this card: name, SMs and architecture."""
    return calibrations_folder() / calibration_name(gpu.name, gpu.sm_count, gpu.arch)
