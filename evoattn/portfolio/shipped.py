"""The portfolios that come with evoattn, one file per architecture: plain data, read once.

The first line of a file is a JSON object: the cards, what was measured, the values that parameters of the kernels have,
and the names of the groups (classes but for their last word), each with the last words of its classes. One line of JSON
per group follows, in the same order, so that a process parses only those that it asks for. A group has kernels, and of
each of its classes the numbers of those that serve it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evoattn.families.registry import completed
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, Value
from evoattn.portfolio.features import features
from evoattn.portfolio.refine import Genes
from evoattn.portfolio.work import predicted_us, work_of

if TYPE_CHECKING:  # NumPy is imported when the first class is read: a wrong word is refused without
    from evoattn.portfolio.likeness import Array

DATA = Path(__file__).parent / "data"
SUFFIX = ".jsonl"


@dataclass(frozen=True)
class ShippedKernel:
    """A config, the blocks of it that fit on one SM, and the constants of its time (`work.Work`).

    `errors` [variants, points]: what the constants get wrong (`likeness.smooth`).
    """

    config: KernelConfig
    resident: int
    constants: tuple[float, ...]
    errors: Array
    splits: tuple[int, ...] = ()
    """Values of SPLITS that the same machine code is launched with."""

    def variants(self) -> tuple[KernelConfig, ...]:
        """The configs that this kernel can run as."""
        if not self.splits:
            return (self.config,)
        return tuple(KernelConfig(self.config.family, self.config.params | {"SPLITS": n}) for n in self.splits)

    def predicted_us(self, problem: AttentionProblem, gpu: GpuSpec, alike: Array) -> list[float]:
        """The time of each of `variants` on the problem. `alike` [points]: `KernelClass.alike`."""
        import numpy as np

        factors = np.exp(self.errors @ alike).tolist()
        return [
            factor * predicted_us(self.constants, work_of(config.family, config.params, self.resident, problem, gpu))
            for config, factor in zip(self.variants(), factors, strict=True)
        ]


@dataclass(frozen=True)
class KernelClass:
    """The kernels of one class (`features.class_of`). `regret` and `worst`: the chosen kernel's time over the best
    known, in geometric mean and at worst, on measured problems that were left out of the choice and of the fit, of its
    group where it has one or two; None where no choice was timed there.

    `points` [points, features]: scaled features of measured problems (`likeness.scaled`).
    """

    kernels: tuple[ShippedKernel, ...]
    regret: float | None
    worst: float | None
    points: Array

    def alike(self, problem: AttentionProblem, gpu: GpuSpec) -> Array:
        """[points]: how much the errors of the points say of those of the problem."""
        from evoattn.portfolio.likeness import likeness, scaled

        row: Array = likeness(scaled([features(problem, gpu)]), self.points)[0]
        return row


@dataclass(frozen=True, eq=False)
class Portfolio:
    """What was measured on the cards of one architecture."""

    arch: str
    cards: tuple[str, ...]
    """Cards that it was judged on, and on which it may run without being asked for."""
    about: list[dict[str, Any]]
    """Of each campaign: card, driver, date, seconds."""
    lines: dict[str, str]
    """Of each group, its JSON, as in the file."""
    classes: tuple[str, ...]
    """Names of all classes."""
    genes: Mapping[str, Genes]
    """By family: the values that each parameter has in one of the kernels."""

    @property
    def measured_on(self) -> str:
        """The cards whose times the constants were fitted to."""
        return " and ".join(sorted({str(row["device"]) for row in self.about}))

    @cache  # noqa: B019 - there is one portfolio per architecture, for the life of the process
    def _group(self, name: str) -> tuple[dict[str, dict[str, Any]], tuple[ShippedKernel, ...], Array]:
        """(its classes by their last word, kernels, points)."""
        import numpy as np

        row = json.loads(self.lines[name])
        return row["classes"], tuple(_kernel(k) for k in row["kernels"]), np.array(row["points"], float)

    def kernel_class(self, name: str) -> KernelClass:
        """One class. Raises `KeyError` where there is none of this name."""
        group, _, size = name.rpartition(" ")
        classes, kernels, points = self._group(group)
        row = classes[size]
        return KernelClass(tuple(kernels[i] for i in row["kernels"]), row["regret"], row["worst"], points)


def _kernel(row: dict[str, Any]) -> ShippedKernel:
    import numpy as np

    config = KernelConfig(row["family"], completed(row["family"], row["params"]))
    splits = tuple(row.get("splits", ()))
    return ShippedKernel(config, row["resident"], tuple(row["constants"]), np.array(row["errors"], float), splits)


@cache
def load(arch: str, folder: Path = DATA) -> Portfolio | None:
    """The portfolio of an architecture, e.g. `sm_90a`, or None where there is none.

    Raises `ValueError` or `KeyError` on a damaged file.
    """
    try:
        first, *lines = (folder / f"{arch}{SUFFIX}").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    head = json.loads(first)
    by_group = dict(zip(head["groups"], lines, strict=True))
    classes = tuple(f"{group} {size}" for group, sizes in head["groups"].items() for size in sizes)
    return Portfolio(arch, tuple(head["cards"]), head["about"], by_group, classes, head["genes"])


def read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The first line of a portfolio's file, and its groups. Raises `OSError` where there is none."""
    first, *lines = path.read_text(encoding="utf-8").splitlines()
    head = json.loads(first)
    return head, {name: json.loads(line) for name, line in zip(head["groups"], lines, strict=True)}


def genes_of(groups: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[Value]]]:
    """By family: the values that each parameter has in one of the groups' kernels, or as a number of splits."""
    found: dict[str, dict[str, set[Value]]] = {}
    for kernel in (kernel for row in groups for kernel in row["kernels"]):
        genes = found.setdefault(kernel["family"], {})
        for name, value in completed(kernel["family"], kernel["params"]).items():
            genes.setdefault(name, set()).add(value)
        genes.get("SPLITS", set()).update(kernel.get("splits", ()))
    return {family: {name: sorted(values) for name, values in genes.items()} for family, genes in found.items()}


def save(
    path: Path,
    cards: list[str],
    about: list[dict[str, Any]],
    groups: dict[str, dict[str, Any]],
    genes: Mapping[str, Genes] | None = None,
) -> None:
    """Write the file of a portfolio. `genes`: of families whose values are not those of the groups' kernels. Raises
    `OSError`."""
    sizes = {name: list(row["classes"]) for name, row in groups.items()}
    values = genes_of(groups.values()) | dict(genes or {})
    rows = [{"cards": cards, "about": about, "genes": values, "groups": sizes}, *groups.values()]
    lines = (json.dumps(_short(row), separators=(",", ":")) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


def _short(value: Any) -> Any:
    """JSON's value with whole floats as integers: most constants and many errors are 0, and `0.0` takes three bytes."""
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_short(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
