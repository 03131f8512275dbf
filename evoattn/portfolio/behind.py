"""Classes for which a portfolio should have no kernels: PyTorch's own attention is faster there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from evoattn.portfolio.campaign import Part
from evoattn.portfolio.features import GROUPED, class_of

CHOSEN_FIRST = ("flash", "cudnn", "efficient", "math")
"""Backends in the order in which PyTorch takes the first that can serve a call."""

Kind = tuple[str, ...]


def kind_of(name: str) -> Kind:
    """What classes are judged together, as few problems have times of peers: bits, head_dim, rows and tiles, and
    whether heads are grouped; not the mask and the number of keys or K/V heads."""
    bits, dim, _, size = name.split()
    return bits, dim, size.split("-")[0], GROUPED if size.endswith(GROUPED) else ""


def beside_pytorch(parts: Iterable[Part]) -> dict[Kind, float]:
    """By kind of classes: the time of the fastest kernel over that of the backend that PyTorch would choose, in
    geometric mean over the problems that have both (`final_table.with_peers`)."""
    logs: dict[Kind, list[float]] = {}
    for part in parts:
        for index, times in part.table.get("peers", {}).items():
            if chosen := next((name for name in CHOSEN_FIRST if name in times), None):
                kind = kind_of(class_of(part.group.problems[int(index)]))
                logs.setdefault(kind, []).append(math.log(times["ours"] / times[chosen]))
    return {kind: math.exp(sum(values) / len(values)) for kind, values in logs.items()}


def faster(name: str, classes: Mapping[str, Any], ratios: Mapping[Kind, float]) -> dict[str, Any]:
    """Of a group's `classes` by their last word those that a portfolio should have: not those of a kind that is behind
    PyTorch. Where one is, of the same bits and head_dim, a kind without such times is taken to be."""
    some_behind = any(ratio > 1 for kind, ratio in ratios.items() if list(kind[:2]) == name.split()[:2])
    unknown = 2.0 if some_behind else 0.0
    return {size: row for size, row in classes.items() if ratios.get(kind_of(f"{name} {size}"), unknown) <= 1}
