"""Measured times of kernels, out of campaigns (`evoattn/portfolio/campaign.py`) and landscapes: many configs, good and
bad, on a few problems (`evoattn/cost/measurements.py`)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from evoattn.cost import measurements
from evoattn.cost.training.rows import Row, without_late
from evoattn.model.errors import WrongUse
from evoattn.model.gpu import DetectedDevice, GpuSpec
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.space import KernelConfig, config_id

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
    left out (`without_late`). Raises `WrongUse` for a file that cannot be read, and where all have no time of a known
    card."""
    rows: dict[tuple[str, str, AttentionProblem, str], Row] = {}
    for path in paths:
        for row in _rows(path):
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
