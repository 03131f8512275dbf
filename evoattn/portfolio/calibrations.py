"""What was measured on the user's own cards: a folder for each, plain data.

`times.jsonl` has every time, a line as soon as it was measured, so that nothing is lost whatever ends a calibration.
`calibration.json` has what came of them: the card's list of kernels, the correction of the cost model, what picks lost
on problems left out. Both hold configs, which are checked against today's search spaces, and never sources."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from evoattn import __version__
from evoattn.backends.versions import driver_version, nvrtc_version, template_digest
from evoattn.cost import correction
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.errors import FailedRun, WrongUse
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.paths import FILE, calibration_folder, calibration_name, calibrations_folder
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.model.whole_file import replace_file
from evoattn.portfolio.kernels import KernelList, of_row, to_row

TIMES = "times.jsonl"
VERSION = 3
"""Of the files: one of another version may mean something else."""
DIGITS = 16
"""Of a digest."""
PROBES = tuple(
    AttentionProblem(batch=2, heads=16, kv_heads=16, seqlen_q=rows, seqlen_k=2048, head_dim=dim, dtype="bf16")
    for rows in (1, 2048)
    for dim in (64, 128, 256)
)
"""Problems whose scores tell one cost model from another."""


def versions_here(families: Iterable[str]) -> dict[str, Any]:
    """What decides times beside the card; no driver where there is none."""
    templates = {name: template_digest(name)[:DIGITS] for name in sorted(families)}
    return {"driver": driver_version(), "nvrtc": nvrtc_version(), "evoattn": __version__, "templates": templates}


def model_digest(kernels: Iterable[KernelConfig], card: Mapping[str, Any]) -> str:
    """Tells by its scores of a card's kernels which cost model it is that a correction is of."""
    from evoattn.cost.cost import scores

    gpu, said = spec_of(card), list[str]()
    for problem in PROBES:
        able = [k for k in kernels if not registry.lookup(k.family).why_impossible(problem, k, gpu)]
        said += [f"{score:.3g}" for score in scores(problem, able, gpu, correction=correction.NONE)]
    return hashlib.sha256(" ".join(said).encode()).hexdigest()[:DIGITS]


@dataclass(frozen=True)
class Calibration:
    """One card's. `card`: name, product, SMs, architecture."""

    card: Mapping[str, Any]
    versions: Mapping[str, Any]
    made: str
    listed: KernelList
    correction: correction.Correction
    judged: Mapping[str, Any]
    """What is said of it: problems, regret, and how often ahead of SDPA."""
    times: int

    @property
    def name(self) -> str:
        return calibration_name(self.card["name"], self.card["sm_count"], self.card["arch"])

    def why_old(self) -> str:
        """What has changed since, of what decides times; empty if nothing has. Without a driver here only the templates
        count."""
        here = versions_here({kernel.family for kernel in self.listed.kernels})
        if any(self.versions["templates"].get(name) != digest for name, digest in here["templates"].items()):
            return "evoattn's templates have changed"
        if self.versions["nvrtc"] != here["nvrtc"]:
            return f"NVRTC was {self.versions['nvrtc']}, and is {here['nvrtc']}"
        if here["driver"] and self.versions["driver"] != here["driver"]:
            return f"the driver was {self.versions['driver']}, and is {here['driver']}"
        return ""

    @property
    def model_changed(self) -> bool:
        """Whether its correction was fitted to another cost model than there is now. It counts all the same: on 45
        problems beside searches first choices lose 1.039 by an older model's correction, 1.044 by one fitted anew,
        1.076 without one (reports/performance.md, 2026-11-28, tenth session)."""
        return bool(self.versions["model"] != model_digest(self.listed.kernels, self.card))

    def current_list(self) -> KernelList:
        """Its list; of another driver, NVRTC or template its kernels are known-good, and not measured."""
        return replace(self.listed, cards=(f"{self.card['name']} before",)) if self.why_old() else self.listed

    def to_row(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "version": VERSION,
            "card": dict(self.card),
            "versions": dict(self.versions),
            "made": self.made,
            "times": self.times,
            "judged": dict(self.judged),
            "correction": self.correction.to_row(),
            "list": to_row(self.listed),
        }

    @classmethod
    def of_row(cls, row: Any) -> Calibration:
        """Raises `ValueError` where it is none, or of another version. Kernels that today's spaces lack are left
        out."""
        try:
            if row["version"] != VERSION:
                raise ValueError(f"it is of version {row['version']!r}, and this evoattn reads {VERSION}")
            card = {name: row["card"][name] for name in ("name", "product", "sm_count", "arch")}
            if not isinstance(card["sm_count"], int) or not all(isinstance(card[n], str) for n in ("name", "arch")):
                raise ValueError("it names no card")
            versions = {name: row["versions"][name] for name in ("driver", "nvrtc", "evoattn", "templates")}
            versions["model"] = str(row["versions"].get("model", ""))  # which files did not say before 2026-11-28
            listed = _known(of_row(card["arch"], row["list"]), spec_of(card))
            found = correction.of_row(row["correction"])
            return cls(card, versions, str(row["made"]), listed, found, dict(row["judged"]), int(row["times"]))
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"it is no calibration ({type(error).__name__}: {error})") from None


def spec_of(card: Mapping[str, Any]) -> GpuSpec:
    """A spec of the card's architecture, as search spaces and families need it."""
    known = GPUS.get(card["name"]) or next((g for g in GPUS.values() if g.arch == card["arch"]), GPUS["a100"])
    return replace(known, name=card["name"], arch=card["arch"], sm_count=card["sm_count"])


def card_of(gpu: GpuSpec) -> dict[str, Any]:
    """As `Calibration.card`."""
    return {"name": gpu.name, "product": gpu.product, "sm_count": gpu.sm_count, "arch": gpu.arch}


def _known(listed: KernelList, gpu: GpuSpec) -> KernelList:
    """The list without kernels that today's families and spaces lack."""
    kept = [
        place
        for place, kernel in enumerate(listed.kernels)
        if kernel.family in registry.FAMILIES and load_space(kernel.family, gpu).has(kernel.params)
    ]
    places = {old: new for new, old in enumerate(kept)}

    def moved(old: Iterable[int]) -> tuple[int, ...]:
        return tuple(places[place] for place in old if place in places)

    genes = {
        family: {
            p.name: [v for v in known.get(p.name, ()) if v in p.values] for p in load_space(family, gpu).parameters
        }
        for family, known in listed.genes.items()
        if family in registry.FAMILIES
    }
    kinds = {kind: found for kind, old in listed.kinds.items() if (found := moved(old))}
    kernels = tuple(listed.kernels[place] for place in kept)
    return replace(listed, kernels=kernels, general=moved(listed.general), kinds=kinds, genes=genes)


def of_card(gpu: GpuSpec) -> Calibration | None:
    """The calibration of a card, or None; a file that is none counts as none."""
    with contextlib.suppress(OSError, ValueError):
        return read(calibration_folder(gpu) / FILE)
    return None


def read(path: Path) -> Calibration:
    """Of a file. Raises `OSError`, and `ValueError` where it is none."""
    return Calibration.of_row(json.loads(path.read_text(encoding="utf-8")))


def every() -> Iterator[Calibration | tuple[str, str]]:
    """All that there are, by their names; of one that cannot be read its name and why."""
    for path in sorted(calibrations_folder().glob(f"*/{FILE}")):
        try:
            yield read(path)
        except (OSError, ValueError) as error:
            yield path.parent.name, str(error)


def named(name: str) -> Calibration:
    """That of a card by the name that `every` gives it, or by the card's name where there is one such. Raises
    `WrongUse`."""
    known = [one for one in every() if isinstance(one, Calibration)]
    found = [one for one in known if one.name == name] or [one for one in known if one.card["name"] == name]
    if len(found) != 1:
        names = ", ".join(one.name for one in known) or "none; `evoattn calibrate` makes one"
        raise WrongUse(f"There is {'more than one' if found else 'no'} calibration of {name!r}. There are: {names}.")
    return found[0]


def save(found: Calibration) -> Path:
    """Put it in place whole; `pick.forget` has this process take it. Raises `OSError`."""
    path = calibrations_folder() / found.name / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(found.to_row()).encode(), None)
    return path


def remove(name: str) -> Path:
    """Remove a card's folder, with all times. Raises `WrongUse` where there is none, and `OSError`."""
    folder = calibrations_folder() / name
    if not (folder / FILE).exists() and not (folder / TIMES).exists():
        folder = calibrations_folder() / named(name).name
    shutil.rmtree(folder)
    return folder


def bring_in(path: Path) -> Calibration:
    """Keep the calibration of a file that `evoattn calibration export` wrote. Raises `WrongUse` where it is none, or
    the card has one."""
    try:
        found = read(path)
    except ValueError as error:
        raise WrongUse(f"{path} cannot be imported: {error}.") from None
    if (calibrations_folder() / found.name / FILE).exists():
        raise WrongUse(
            f"There is a calibration of {found.name}: `evoattn calibration remove {found.name}` comes first."
        )
    save(found)
    return found


_USUAL = {f.name: f.default for f in fields(AttentionProblem) if f.default is not MISSING}


def short(problem: AttentionProblem) -> dict[str, Any]:
    """The fields of a problem that are not as usual."""
    return {name: value for name, value in problem.to_dict().items() if _USUAL.get(name, MISSING) != value}


class Journal:
    """The times of a card: lines that are added, by one process at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._handle, self._lock = folder, -1, -1

    def __enter__(self) -> Journal:
        """Raises `FailedRun` where another process calibrates the card, and `OSError`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise FailedRun("Another process calibrates this card; wait for it or end it.") from None
        self._handle = os.open(self.folder / TIMES, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)
        os.close(self._lock)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append, all in one write. Raises `OSError`."""
        if data := "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode():
            os.write(self._handle, b"\n" + data)  # the newline ends what a process that was killed has left


def times_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The times of a journal, each with what its line says of the kernel; lines that are not whole are passed over."""
    try:
        text = (folder / TIMES).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            times = row.pop("times")
            yield from [row | time for time in times]
