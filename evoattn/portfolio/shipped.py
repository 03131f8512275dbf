"""The portfolios that come with evoattn, one JSON file per architecture: plain data, read once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio.work import predicted_us, work_of

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class ShippedKernel:
    """A config, the blocks of it that fit on one SM, and the constants of its time (`work.Work`)."""

    config: KernelConfig
    resident: int
    constants: tuple[float, ...]
    splits: tuple[int, ...] = ()
    """Values of SPLITS that the same machine code can be launched with."""

    def variants(self) -> tuple[KernelConfig, ...]:
        """The configs that this kernel can run as."""
        if not self.splits:
            return (self.config,)
        return tuple(KernelConfig(self.config.family, self.config.params | {"SPLITS": n}) for n in self.splits)

    def predicted_us(self, config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> float:
        """The time of one of `variants` on the problem (`work.predicted_us`)."""
        return predicted_us(self.constants, work_of(config.family, config.params, self.resident, problem, gpu))


@dataclass(frozen=True)
class KernelClass:
    """The kernels of one class (`features.class_of`). `regret` and `worst`: the chosen kernel's time over the best
    known, in geometric mean and at worst, on measured problems each of which was left out of the fit."""

    kernels: tuple[ShippedKernel, ...]
    regret: float
    worst: float


@dataclass(frozen=True)
class Portfolio:
    """What was measured on the cards of one architecture."""

    arch: str
    cards: tuple[str, ...]
    """Cards that it was judged on, and on which it may run without being asked for."""
    about: list[dict[str, Any]]
    """Of each campaign: card, driver, date, seconds."""
    classes: dict[str, KernelClass]

    @property
    def measured_on(self) -> str:
        """The cards whose times the constants were fitted to."""
        return " and ".join(sorted({str(row["device"]) for row in self.about}))


def _kernel(row: dict[str, Any]) -> ShippedKernel:
    config = KernelConfig(row["family"], row["params"])
    return ShippedKernel(config, row["resident"], tuple(row["constants"]), tuple(row.get("splits", ())))


@cache
def load(arch: str, folder: Path = DATA) -> Portfolio | None:
    """The portfolio of an architecture, e.g. `sm_90a`, or None where there is none."""
    try:
        text = json.loads((folder / f"{arch}.json").read_text())
    except OSError:
        return None
    classes = {
        name: KernelClass(tuple(_kernel(k) for k in row["kernels"]), row["regret"], row["worst"])
        for name, row in text["classes"].items()
    }
    return Portfolio(arch, tuple(text["cards"]), text["about"], classes)
