"""The kernels that come with evoattn for an architecture, at which every pick begins, as plain JSON.

A file says on which cards its kernels were timed and which of them were fast on which kind of problems, what climbs
from them may change, and which problems are left to PyTorch. `evoattn portfolio select` writes it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from evoattn.families import registry
from evoattn.model.backward import BACKWARD
from evoattn.model.problem import AttentionProblem
from evoattn.model.scales import ANSWERED, PER_TOKEN
from evoattn.model.space import KernelConfig, Value
from evoattn.model.variant import ROTARY_APART

DATA = Path(__file__).parent / "data"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""A place in a list, of families or of a gene's values."""
Genes = Mapping[str, Sequence[Value]]
"""Values that each parameter of a family may have."""


UNTIMED = ("value_dim", "score", "blocks", "appended")
"""Variants that make no kind."""
BY_FORMULA = ("score", "blocks", "softcap", "sink", "alibi")
"""Variants of which PyTorch has the gradients by a formula alone, which holds scores in memory: of a soft cap it
took 12 times Triton's time (reports/performance.md, 2026-11-26, evening: FlexAttention's language again). They and
`deterministic` beside them make no kind of the backward pass."""
REFUSED_BY_SDPA = ("softcap", "sink")
"""Of the forward pass: a kernel need not be timed beside a formula."""


def is_by_formula(problem: AttentionProblem) -> bool:
    """Whether PyTorch would compute a formula in a kernel's place."""
    of = BY_FORMULA if problem.op == BACKWARD.name else ("score", "blocks")
    return not set(of).isdisjoint(problem.variants)


def kind_of(problem: AttentionProblem, without: tuple[str, ...] = ()) -> str:
    """What must have been timed before a kernel may run unasked: bits, an operation that is not the forward pass,
    head_dim, V's if it has one of its own, and the variants, e.g. `16 d64`, `16 backward d192 dv128 varlen`.

    fp16 and bf16 share their kernels: the same instructions at the same rates. Masks share them as well, and
    expressions of scores and block lists, in whose place PyTorch would hold all scores in memory; of the backward pass
    all of `BY_FORMULA`. K that lies in two tensors is read as one of which V is a part. `without`: variants that are
    left out."""
    dims = f"d{problem.head_dim}" + (f" dv{problem.value_dim}" if problem.value_dim else "")
    backward, by_formula = problem.op == BACKWARD.name, is_by_formula(problem)
    untimed = UNTIMED + BY_FORMULA * backward + without
    variants = ("shared_kv" if name == ROTARY_APART else name for name in problem.variants if name not in untimed)
    if problem.scales != PER_TOKEN:  # a scale of a head is that of a tensor with other strides
        variants = (name for name in variants if name != "scales")
    if problem.element_bytes == 1:  # products of e4m3 and e5m2 take as long as those of e4m3 alone
        variants = (name for name in variants if name != "kv")
    said = "forward" if problem.op in ANSWERED else problem.op  # Q is one of many reads
    op = [said] * (said != "forward") + ["deterministic"] * (problem.deterministic and not by_formula)
    width = problem.dtype if problem.dtype == "int8" else str(8 * problem.element_bytes)
    return " ".join((width, *op, dims, *variants))


@dataclass(frozen=True)
class Skipped:
    """Problems of the forward pass on which PyTorch's own attention was faster than every kernel."""

    dtype: str
    least_dim: int
    """The narrowest head_dim."""
    most_rows: int
    """The most query rows that share a K/V head."""

    def covers(self, problem: AttentionProblem) -> bool:
        rows = problem.group_size * problem.seqlen_q
        few = problem.head_dim >= self.least_dim and rows <= self.most_rows
        return problem.op == "forward" and problem.dtype == self.dtype and few


@dataclass(frozen=True, eq=False)
class KernelList:
    """What was found on the cards of one architecture."""

    arch: str
    cards: tuple[str, ...]
    """On which its kernels may run without being asked for."""
    skipped: tuple[Skipped, ...]
    regret: Mapping[str, float]
    """What a pick takes over the best of a search, geometric mean of problems left out: `plain` and `variants`."""
    genes: Mapping[str, Genes]
    """By family: values of parameters that right kernels had."""
    kernels: Sequence[KernelConfig]
    general: tuple[int, ...]
    """Of the kernels those for plain attention of any head_dim, and for kinds of problems that none was timed on."""
    kinds: Mapping[str, tuple[int, ...]]
    """By kind of problems (`kind_of`): those that were fast there."""

    def kind_of(self, problem: AttentionProblem) -> str:
        """The kind that was timed for a problem: its own, or if none was that without what SDPA refuses."""
        own = kind_of(problem)
        return own if own in self.kinds or problem.op != "forward" else kind_of(problem, REFUSED_BY_SDPA)

    def of(self, problem: AttentionProblem) -> tuple[list[KernelConfig], list[KernelConfig]]:
        """The kernels that were fast on the problem's kind, and all that may serve it, these first. On 40 problems of
        plain attention that nothing was made from picks take 1.021 times the best known with the general kernels and
        1.036 without; on 42 with variants 1.082 and 1.073."""
        timed = self.kinds.get(self.kind_of(problem), ())
        others = self.general if not timed or not problem.variants or is_by_formula(problem) else ()
        return [self.kernels[i] for i in timed], [self.kernels[i] for i in dict.fromkeys((*timed, *others))]

    def regret_of(self, problem: AttentionProblem) -> float | None:
        """What a pick for a problem of a timed kind takes over the best of a search; None for other kinds, and where
        PyTorch has a formula alone."""
        if kind_of(problem) not in self.kinds or is_by_formula(problem):
            return None
        return self.regret.get("variants" if problem.variants else "plain")


@cache
def load(arch: str, folder: Path = DATA) -> KernelList | None:
    """The list of an architecture, e.g. `sm_90a`, or None where there is none.

    Raises `ValueError`, `KeyError` or `TypeError` on a damaged file; a kernel's row raises when it is asked for."""
    try:
        row = json.loads((folder / f"{arch}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return of_row(arch, row)


def of_row(arch: str, row: Mapping[str, Any]) -> KernelList:
    """The list that a file holds. Raises as `load` does."""
    return KernelList(
        arch,
        tuple(row["cards"]),
        tuple(Skipped(**one) for one in row["skipped"]),
        row["regret"],
        row["genes"],
        _Kernels(row["genes"], row["kernels"]),
        tuple(row["general"]),
        {kind: tuple(places) for kind, places in row["kinds"].items()},
    )


class _Kernels(Sequence[KernelConfig]):
    """Those of a file's rows, each made when it is asked for: a pick that is known asks for none."""

    def __init__(self, genes: Mapping[str, Genes], rows: Sequence[str]) -> None:
        self._rows, self._like = rows, dict[str, dict[str, Value]]()
        self._genes = dict(zip(DIGITS, genes.items()))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: Any) -> Any:
        family, genes = self._genes[(row := self._rows[place])[0]]
        found = zip(genes.items(), row[1:], strict=True)
        params = {name: values[DIGITS.index(digit)] for (name, values), digit in found}
        if family not in self._like:
            self._like[family] = _completed(family, params)
        return KernelConfig(family, self._like[family] | params)


def _to_places(genes: Mapping[str, Genes], kernel: KernelConfig) -> str:
    """Of a kernel the place of its family, and of each value that of its gene. Raises `ValueError` for another one."""
    values = (list(values).index(kernel.params[name]) for name, values in genes[kernel.family].items())
    return "".join(DIGITS[place] for place in (list(genes).index(kernel.family), *values))


def _completed(family: str, genes: dict[str, Any]) -> dict[str, Any]:
    """With the defaults of parameters that are younger than the file, which are the same for all kernels of a family;
    of one that is no family any more as they are."""
    return registry.completed(family, genes) if family in registry.FAMILIES else genes


def to_row(found: KernelList) -> dict[str, Any]:
    """What a file holds: of a kernel the place of its family among `genes`, and those of its values, as `DIGITS`."""
    return {
        "cards": found.cards,
        "skipped": [vars(one) for one in found.skipped],
        "regret": dict(found.regret),
        "genes": {family: dict(genes) for family, genes in found.genes.items()},
        "general": found.general,
        "kinds": dict(found.kinds),
        "kernels": [_to_places(found.genes, kernel) for kernel in found.kernels],
    }


def save(path: Path, found: KernelList) -> None:
    """Write the file, a kernel a line. Raises `OSError`."""
    head = to_row(found)
    rows = head.pop("kernels")
    lines = [f" {json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in head.items()]
    kernels = ",\n".join(json.dumps(row) for row in rows)
    path.write_text("{\n" + ",\n".join(lines) + ',\n "kernels": [\n' + kernels + "\n]\n}\n", encoding="utf-8")
