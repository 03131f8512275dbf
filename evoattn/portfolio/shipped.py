"""The portfolios that come with evoattn, one JSON file per GPU: plain data, read once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio.features import features

DATA = Path(__file__).parent / "data"
PROBLEM_FIELDS = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")


@dataclass(frozen=True)
class KernelClass:
    """The kernels of one class (`features.class_of`), and what they took on the problems that they were measured on."""

    kernels: tuple[KernelConfig, ...]
    measured: tuple[dict[str, float], ...]
    """Features of the measured problems."""
    slowdowns: tuple[tuple[float | None, ...], ...]
    """Per measured problem, each kernel's time over the best known there; None where it cannot serve it."""
    regret: float
    """Geometric mean of the chosen kernel's time over the best known, each problem left out of the rule in turn."""
    worst: float


@dataclass(frozen=True)
class Portfolio:
    """What was measured on one card."""

    gpu: str
    about: dict[str, Any]
    """Card, driver, versions, date and campaign."""
    classes: dict[str, KernelClass]


def _class(row: dict[str, Any], name: str, gpu: GpuSpec) -> KernelClass:
    bits, dim, mask = name.split()
    fixed = {
        "head_dim": int(dim[1:]),
        "dtype": "fp32" if bits == "32" else "bf16",
        "mask": "full" if mask == "full" else "causal_lower_right",
    }
    problems = [AttentionProblem(**dict(zip(PROBLEM_FIELDS, sizes, strict=True)), **fixed) for sizes in row["problems"]]
    return KernelClass(
        tuple(KernelConfig(k["family"], k["params"]) for k in row["kernels"]),
        tuple(features(p, gpu) for p in problems),
        tuple(tuple(s) for s in row["slowdowns"]),
        row["regret"],
        row["worst"],
    )


@cache
def load(gpu: GpuSpec) -> Portfolio | None:
    """The portfolio measured on this kind of card, or None where there is none."""
    path = DATA / f"{gpu.name}.json"
    try:
        text = json.loads(path.read_text())
    except OSError:
        return None
    classes = {name: _class(row, name, gpu) for name, row in text["classes"].items()}
    return Portfolio(gpu.name, text["about"], classes)
