"""Measured times of kernels, out of campaigns (`evoattn/portfolio/campaign.py`) and landscapes
(`benchmarks/samplers/landscapes.py`)."""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from evoattn.cost import measurements
from evoattn.families.flash_wgmma.genes import FlashWgmmaGenes
from evoattn.families.flash_wgmma.resources import gang_size
from evoattn.model.gpu import DetectedDevice, GpuSpec
from evoattn.model.paths import ROOT
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.space import KernelConfig, config_id
from evoattn.samplers import landscape
from scripts.cost.late import without_late
from scripts.cost.row import Row

LANDSCAPES = ROOT / "docs" / "landscapes"
LANDSCAPE_FOLD = 8
"""Landscapes are few, hold good and bad kernels alike, and all families."""
LATE_LAUNCH = ("h100-2026-11-22-a", "h100-2026-11-22-b", "h100-2026-11-22-c")
"""Campaigns in which one launch that the CPU was late with was sometimes taken for a time. Of a problem whose best is
short, times that may be such are left out."""
GANGS_SINCE = "2026-11-23"
"""Kernels whose blocks are gangs today (`evoattn/families/gangs.py`) had none in what was saved before."""


def files() -> list[Path]:
    """All measured times in the repository: campaigns, as `campaign.load` takes them, and files of landscapes."""
    campaigns = sorted(path / one.name for path in measurements.files() for one in measurements.read(path))
    return [*campaigns, *sorted(LANDSCAPES.glob("*.jsonl.gz"))]


def read(paths: Iterable[Path]) -> list[Row]:
    """All rows of the files, one per kind of file, card, problem and config: the last file's. Times that are none are
    left out (`scripts/cost/late.py`)."""
    rows: dict[tuple[str, str, AttentionProblem, str], Row] = {}
    for path in paths:
        for row in _rows(path):
            rows[row.source, row.gpu.name, row.problem, config_id(row.family, row.config.params)] = row
    return without_late(list(rows.values()))


def launched_as_today(rows: Iterable[Row]) -> list[Row]:
    """The rows but those of kernels that have gangs today and had none when they were timed."""
    return [row for row in rows if row.saved >= GANGS_SINCE or not _has_gangs(row)]


def _has_gangs(row: Row) -> bool:
    return row.family == "flash_wgmma" and gang_size(row.problem, FlashWgmmaGenes.of(row.config), row.gpu) > 1


def _rows(path: Path) -> Iterator[Row]:
    if path.parent.name == "landscapes" or path.name.startswith("landscapes"):
        yield from _of_landscapes(landscape.load(path))
        return
    if path.parent.suffix == ".npz":
        recorded = measurements.campaign(path.parent, path.name)
        about, groups = recorded.about, recorded.groups
    else:
        with gzip.open(path, "rt") as file:
            about, *groups = [json.loads(line) for line in file]
    card = DetectedDevice(0, about["device"], (9, 0), "").spec
    if card is None:
        return
    late = path.name.removesuffix(".jsonl.gz") in LATE_LAUNCH
    for group in groups:
        yield from _of_group(card, group, late, about["saved"])


def _of_landscapes(landscapes: Iterable[landscape.Landscape]) -> Iterator[Row]:
    for one in landscapes:
        card = DetectedDevice(0, one.about["device"], (9, 0), "").spec
        for found in (*one.configs, *one.elsewhere):
            if card is not None and found.best_us is not None and found.state == "right":
                config = KernelConfig(found.family, found.params)
                problem = one.problem.with_()
                numbers = found.registers, found.spills, found.best_us
                yield Row(card, problem, config, *numbers, "landscape", one.about["saved"])


def _of_group(card: GpuSpec, group: dict[str, Any], late: bool, saved: str) -> Iterator[Row]:
    """A campaign's group: times of the search, and in their place those of the final table, taken in turns."""
    problems = [_problem(p) for p in group["problems"]]
    kernels = {k["id"]: k for k in group["kernels"] if k["state"] == "right" and k["registers"]}
    times: dict[int, dict[str, float]] = defaultdict(dict)
    rough: set[tuple[int, str]] = set()
    for name, kernel in kernels.items():
        for index, us in kernel["times"].items():
            times[int(index)][name] = us
        rough |= {(index, name) for index in kernel["rough"]}
    for index, row in enumerate((group.get("final") or {"us": []})["us"]):
        for name, us in zip(group["final"]["kernels"], row, strict=True):
            if us is not None and name in kernels:
                times[index][name] = us
    for index, found in times.items():
        best, problem = min(found.values()), problems[index]
        for name, us in found.items():
            if problem is None or (late and _may_be_late(us, best, (index, name) in rough)):
                continue
            k = kernels[name]
            config = KernelConfig(k["family"], k["params"])
            yield Row(card, problem, config, k["registers"], k["spill_bytes"], us, "campaign", saved)


def _may_be_late(us: float, best: float, rough: bool) -> bool:
    if best < 80 and us > 85 and us > 2.2 * best:
        return True
    return rough and best < 300 and us - best > 30 and us < 1200


def _problem(fields: dict[str, Any]) -> AttentionProblem | None:
    """None of a problem that today's version does not know."""
    try:
        return AttentionProblem(**fields).with_()
    except (ProblemError, TypeError):
        return None


def thinned(rows: Iterable[Row], most: int, seed: int = 0) -> list[Row]:
    """At most `most` rows of a problem of a campaign on a card, a third of them its fastest, the others at random; of a
    landscape `LANDSCAPE_FOLD` times as many."""
    rng = random.Random(seed)
    groups: dict[tuple[str, str, AttentionProblem], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.source, row.gpu.name, row.problem].append(row)
    chosen = []
    for (source, *_), group in groups.items():
        group.sort(key=lambda row: row.us)
        each = most * (LANDSCAPE_FOLD if source == "landscape" else 1)
        chosen += group[: each // 3] + rng.sample(rest := group[each // 3 :], min(len(rest), each - each // 3))
    return chosen
