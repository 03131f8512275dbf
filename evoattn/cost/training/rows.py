"""Measured times of kernels, each with its kernel and GPU: out of campaigns (`evoattn/portfolio/campaign.py`) and
landscapes: many configs, good and bad, on a few problems (`evoattn/cost/measurements.py`); which a fit is given."""

import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoattn.cost import measurements
from evoattn.cost.cost import physical_part
from evoattn.cost.fitted import load
from evoattn.families import registry
from evoattn.families.backward_wgmma.resources import BackwardWgmmaGenes, v_steps
from evoattn.families.flash_wgmma.resources import FlashWgmmaGenes, gang_size
from evoattn.model.errors import WrongUse
from evoattn.model.gpu import DetectedDevice, GpuSpec
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.space import KernelConfig, config_id

LANDSCAPE_FOLD = 8
"""Landscapes are few, hold good and bad kernels alike, and all families."""
GANGS_SINCE = "2026-11-23"
"""Kernels whose blocks are gangs today (`evoattn/families/gangs.py`) had none in what was saved before."""
VALUES_SINCE = "2026-11-29"
"""As `GANGS_SINCE`, of kernels of backward_wgmma that read V from registers today: 0.945 to 0.985 of their time."""
FAR_OFF, FAR_OFF_ALONE, LEAST_US, MOST_US = 8.0, 4.0, 50.0, 10_000.0
"""A time is late that is so many times what two others let expect, and more by so many µs than either: what the kernel
takes on its other problems, in medians, and the physical part of the cost model. A launch is late by 60 µs to 8 ms.
Times of `ALONE_FROM_US` and more may be one call's, late by at most `MOST_US`: of such, one in 400 is more than twice
the model's score for a kernel that it was fitted to, of shorter ones one in 10,000."""
ALONE_FROM_US = 300.0
MOST_LATE = 3
"""Late launches of a kernel in a source's times on a card. They come by chance: of 720,881 times 546 are late, three of
a kernel at most. A kernel with more such times is slow on some problems: one of split_kv takes 6 to 44 times what
the physical part says on prefills, on 4 to 6 of 27 to 96 problems."""
MEDIANS = 2
"""Rounds of medians over problems and kernels."""


@dataclass(frozen=True)
class Row:
    """One kernel timed on one problem."""

    gpu: GpuSpec
    problem: AttentionProblem
    config: KernelConfig
    registers: int
    spill_bytes: int
    us: float
    source: str
    """`campaign`: found by a search, so mostly good. `landscape`: good and bad alike."""
    saved: str = ""
    """The day on which it was saved, as 2026-11-23."""

    @property
    def family(self) -> str:
        return self.config.family


def without_late(rows: Sequence[Row]) -> list[Row]:
    """The rows but those whose time is that of a launch that the CPU was late with, not the kernel's."""
    expected = usual_us(rows)
    late = [_far(row.us, us) and _beyond_physics(row) for row, us in zip(rows, expected, strict=True)]
    times = Counter(_kernel(row) for row, is_late in zip(rows, late, strict=True) if is_late)
    return [row for row, is_late in zip(rows, late, strict=True) if not is_late or times[_kernel(row)] > MOST_LATE]


def _kernel(row: Row) -> tuple[str, str, str]:
    return row.source, row.gpu.name, config_id(row.family, row.config.params)


def usual_us(rows: Sequence[Row]) -> NDArray[np.float64]:
    """What each row's kernel and problem let expect: the median of the problem times the median factor of the kernel
    over such medians. That of a kernel with one time is this time."""
    logs = np.log([row.us for row in rows])
    problems = alike((row.source, row.gpu.name, row.problem) for row in rows)
    kernels = alike(map(_kernel, rows))
    expected = np.zeros(len(rows))
    for _ in range(MEDIANS):
        for groups in (problems, kernels):
            left = logs - expected
            for group in groups:
                expected[group] += np.median(left[group])
    usual: NDArray[np.float64] = np.exp(expected)
    return usual


def alike(keys: Iterable[Hashable]) -> list[list[int]]:
    """Places of equal ones."""
    groups = defaultdict(list)
    for place, key in enumerate(keys):
        groups[key].append(place)
    return list(groups.values())


def _far(us: float, expected: float) -> bool:
    alone = us >= ALONE_FROM_US and us < expected + MOST_US
    return us > (FAR_OFF_ALONE if alone else FAR_OFF) * expected and us > expected + LEAST_US


def _beyond_physics(row: Row) -> bool:
    part = physical_part(row.problem, row.config, row.gpu, row.registers, load())
    return part is not None and _far(row.us, part.us)


def with_genes(rows: Iterable[Row]) -> list[Row]:
    """The rows but those of kernels with genes, or values by name, that their family has no more, or without a gene
    that it has."""
    return [row for row in rows if _has_genes(row)]


def _has_genes(row: Row) -> bool:
    try:
        registry.lookup(row.family).genes.of(row.config)
    except TypeError:
        return False
    known = _names(row.family)
    return all(value in known[name] for name, value in row.config.params.items() if isinstance(value, str))


@cache
def _names(family: str) -> dict[str, tuple[Any, ...]]:
    """The values of a family's genes."""
    return {one.name: one.values for one in registry.lookup(family).genes.parameters()}


def launched_as_today(rows: Iterable[Row]) -> list[Row]:
    """The rows but those of kernels that have gangs today, or V in registers, and had none when they were timed."""
    return [row for row in rows if not (_lacked_gangs(row) or _lacked_values(row))]


def _lacked_gangs(row: Row) -> bool:
    if row.saved >= GANGS_SINCE or row.family != "flash_wgmma":
        return False
    return gang_size(row.problem, FlashWgmmaGenes.of(row.config), row.gpu) > 1


def _lacked_values(row: Row) -> bool:
    if row.saved >= VALUES_SINCE or row.family != "backward_wgmma":
        return False
    return v_steps(row.problem, BackwardWgmmaGenes.of(row.config)) > 0


def thinned(rows: Iterable[Row], most: int) -> list[Row]:
    """At most `most` rows of a problem of a campaign on a card, a third of them its fastest, the others at random; of a
    landscape `LANDSCAPE_FOLD` times as many."""
    rng = random.Random(0)
    groups: dict[tuple[str, str, AttentionProblem], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.source, row.gpu.name, row.problem].append(row)
    chosen = []
    for (source, *_), group in groups.items():
        group.sort(key=lambda row: row.us)
        each = most * (LANDSCAPE_FOLD if source == "landscape" else 1)
        chosen += group[: each // 3] + rng.sample(rest := group[each // 3 :], min(len(rest), each - each // 3))
    return chosen


LATE_LAUNCH = ("h100-2026-11-22-a", "h100-2026-11-22-b", "h100-2026-11-22-c")
"""Campaigns in which one launch that the CPU was late with was sometimes taken for a time. Of a problem whose best is
short, times that may be such are left out."""
RECALLED = "recalled"
"""Origin of a kernel whose times another campaign took (`portfolio/campaign.py`)."""
LEAST_BOTH, MOST_SHIFT = 3, 1.2
"""Times of a final are brought to the level of the search's, by the median of the kernels that have both, if so many
have: a final is held later, on a card that is warmer. Of 2,900 problems finals take 1.3 % longer, with a standard
deviation of 3 %, and kernels that have no final are compared with those that have. More than so many times the other is
no matter of the level."""


def files() -> list[Path]:
    """All measured times in the repository: campaigns and landscapes, as `reports/measurements/CARD.npz/NAME`."""
    campaigns = sorted(path / name for path in measurements.files() for name in measurements.names(path))
    kept = measurements.LANDSCAPES
    return campaigns + ([kept / name for name in measurements.names(kept)] if kept.exists() else [])


def named(names: Iterable[str]) -> list[Path]:
    """Those of these names, as a fit's `about` has them. Raises `WrongUse` where one is not in the repository."""
    known, wanted = {name_of(path): path for path in files()}, [name_of(Path(name)) for name in names]
    if missing := [name for name in wanted if name not in known]:
        raise WrongUse(f"The fit that ships has times of {missing[0]}, which are not in {measurements.FOLDER}.")
    return [known[name] for name in wanted]


def name_of(path: Path) -> str:
    """A campaign's, whether the repository has it or a search wrote the file."""
    return path.name.removesuffix(".jsonl.gz")


def read(paths: Iterable[Path]) -> list[Row]:
    """All rows of the files, one per kind of file, card, problem and config: the last file's. Times that are none are
    left out (`without_late`), and those of kernels that no family has today (`with_genes`). Raises `WrongUse` for a
    file that cannot be read, and where all have no time of a known card."""
    rows: dict[tuple[str, str, AttentionProblem, str], Row] = {}
    for path in paths:
        for row in with_genes(_rows(path)):
            rows[row.source, row.gpu.name, row.problem, config_id(row.family, row.config.params)] = row
    if not rows:
        raise WrongUse("No measured times were found: a checkout of the repository has some, or name files that do.")
    return without_late(list(rows.values()))


def is_landscape(path: Path) -> bool:
    """Whether these are times of a landscape, not of a campaign."""
    return path.parent.name == measurements.LANDSCAPES.name


def _rows(path: Path) -> Iterator[Row]:
    with _readable(path):
        recorded = measurements.recorded(path)
        card = DetectedDevice(0, recorded.about["device"], (9, 0), "").spec
    if card is None:
        return
    for group in recorded.groups:
        if is_landscape(path):
            yield from _of_landscapes(card, group, recorded.about["saved"])
        else:
            yield from _of_group(card, group, recorded.name in LATE_LAUNCH, recorded.about["saved"])


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, KeyError, ValueError) as error:
        raise WrongUse(f"{path} has no measured times: {error}.") from None


def _of_landscapes(card: GpuSpec, group: dict[str, Any], saved: str) -> Iterator[Row]:
    """A group's problems in turn, of each the configs that a search could propose first: the less of two times."""
    kernels = [kernel for kernel in group["kernels"] if kernel["state"] == "right"]
    for index, problem in enumerate(map(_problem, group["problems"])):
        timed = [kernel for kernel in kernels if str(index) in kernel["times"]]
        for kernel in sorted(timed, key=lambda kernel: index not in kernel["valid"]):
            us = min(times[str(index)] for times in (kernel["times"], kernel["again"]) if str(index) in times)
            config = KernelConfig(kernel["family"], kernel["params"])
            if problem is not None:
                yield Row(card, problem, config, kernel["registers"], kernel["spill_bytes"], us, "landscape", saved)


def _of_group(card: GpuSpec, group: dict[str, Any], late: bool, saved: str) -> Iterator[Row]:
    """A campaign's group: times of the search, and in their place those of the final table, taken in turns, at the
    search's level."""
    problems = [_problem(p) for p in group["problems"]]
    kernels = {k["id"]: k for k in group["kernels"] if k["state"] == "right" and k["registers"]}
    times: dict[int, dict[str, float]] = defaultdict(dict)
    rough: set[tuple[int, str]] = set()
    for name, kernel in kernels.items():
        for index, us in kernel["times"].items():
            times[int(index)][name] = us
        rough |= {(index, name) for index in kernel["rough"]}
    searched = {name for name, kernel in kernels.items() if kernel["origin"] != RECALLED}
    for index, row in enumerate((group.get("final") or {"us": []})["us"]):
        final = {n: us for n, us in zip(group["final"]["kernels"], row, strict=True) if us is not None and n in kernels}
        if not final:
            continue
        both = [n for n in final if n in searched and n in times[index] and (index, n) not in rough]
        level = median(times[index][n] / final[n] for n in both) if len(both) >= LEAST_BOTH else 1.0
        level = level if 1 / MOST_SHIFT < level < MOST_SHIFT else 1.0
        times[index] |= {name: us * level for name, us in final.items()}
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
