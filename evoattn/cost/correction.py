"""What the cost model's scores are multiplied by on a card that its owner has calibrated: factors of families, of parts
of the cost and of genes, fitted to times that were measured on it (`correction_fit.py`).

Only the order of kernels of one problem is corrected. Reading a correction imports no NumPy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from evoattn.model.calibrated import FILE, calibration_folder
from evoattn.model.gpu_spec import GpuSpec
from evoattn.model.space import KernelConfig, spelling

MOST = 1.0
"""Natural logarithm of a correction, at most."""


@dataclass(frozen=True)
class Correction:
    """Natural logarithms of factors by `name_of`; a part counts by its share of all."""

    factors: Mapping[str, float] = field(default_factory=dict)

    def log(self, config: KernelConfig, parts: Mapping[str, float]) -> float:
        """Of what a score is multiplied by."""
        if not self.factors:
            return 0.0
        found = sum(self.factors.get(name, 0.0) * value for name, value in terms(config, parts).items())
        return max(-MOST, min(MOST, found))

    def factor(self, config: KernelConfig, parts: Mapping[str, float]) -> float:
        return math.exp(self.log(config, parts))


NONE = Correction()


def terms(config: KernelConfig, parts: Mapping[str, float]) -> dict[str, float]:
    """What is known of a kernel, by name: its family and genes, and each part's share."""
    whole = sum(parts.values()) or 1.0
    found = {f"part {name}": us / whole for name, us in parts.items()}
    found |= {f"{config.family} {name}={spelling(value)}": 1.0 for name, value in config.params.items()}
    return found | {config.family: 1.0}


_put: dict[GpuSpec, Correction] = {}


def put(gpu: GpuSpec, found: Correction) -> None:
    """Have this process, and those that it forks, take a correction that no file has yet."""
    _put[gpu] = found
    correction_of.cache_clear()


def forget() -> None:
    """Read the files anew."""
    _put.clear()
    correction_of.cache_clear()


@cache
def correction_of(gpu: GpuSpec) -> Correction:
    """What a calibration of the card found; none where there is none, or its file says something else."""
    if gpu in _put:
        return _put[gpu]
    try:
        row = json.loads((calibration_folder(gpu) / FILE).read_text(encoding="utf-8"))
        return of_row(row["correction"])
    except (OSError, ValueError, KeyError, TypeError):
        return NONE


def of_row(row: Any) -> Correction:
    """Of what a file says. Raises `ValueError` where that is no table of numbers."""
    if not isinstance(row, dict) or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in row.values()):
        raise ValueError("a correction is no table of numbers")
    return Correction(row)
