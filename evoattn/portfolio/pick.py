"""The kernel that would run for a problem: of the user's own searches, of this card's portfolio, or of the nearest card's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evoattn.families import registry
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio import shipped
from evoattn.portfolio.features import class_of, features
from evoattn.portfolio.rule import losses
from evoattn.portfolio.shipped import KernelClass


@dataclass(frozen=True)
class Pick:
    """One choice. `expected_regret` is its class's geometric mean of time over the best known, on problems left out; None if unknown."""

    family: str
    config: KernelConfig
    why: str
    estimated: bool
    """No card of this kind was measured for this class: the choice may be slow."""
    expected_regret: float | None
    source: Literal["exact", "portfolio"]


def _cards(gpu: GpuSpec) -> list[GpuSpec]:
    """Cards whose portfolios may serve: this one, then those of its architecture, then older ones, newest first."""
    others = [g for g in GPUS.values() if g.name != gpu.name and g.capability <= gpu.capability]
    return [gpu, *sorted(others, key=lambda g: (g.capability, -abs(g.sm_count - gpu.sm_count)), reverse=True)]


def _nearest_class(problem: AttentionProblem, names: list[str]) -> str | None:
    """The class of the least head_dim above the problem's (else the greatest) with equal bits and mask."""
    bits, dim, mask = class_of(problem).split()
    dims = sorted(int(n.split()[1][1:]) for n in names if n.split()[0] == bits and n.split()[2] == mask)
    if not dims:
        return None
    return f"{bits} d{next((d for d in dims if d >= int(dim[1:])), dims[-1])} {mask}"


def ranked(problem: AttentionProblem, gpu: GpuSpec, kernels: KernelClass) -> list[tuple[float, KernelConfig]]:
    """(expected logarithm of time over the best, config) of the class's kernels that can serve the problem, the best first."""
    expected = losses(features(problem, gpu), kernels.measured, kernels.slowdowns)
    valid = [
        (loss, config)
        for loss, config in zip(expected, kernels.kernels, strict=True)
        if not registry.lookup(config.family).why_invalid(problem, config, gpu)
    ]
    return sorted(valid, key=lambda pair: pair[0])


def pick(problem: AttentionProblem, gpu: GpuSpec) -> Pick | None:
    """The kernel for `problem` on `gpu`, or None where no portfolio has one that can serve it.

    A GPU that was never measured takes the portfolio of the nearest card, a head_dim that was never measured that of the next one; such
    picks are `estimated`.
    """
    own = class_of(problem)
    for card in _cards(gpu):
        portfolio = shipped.load(card)
        if portfolio is None:
            continue
        name = own if own in portfolio.classes else _nearest_class(problem, list(portfolio.classes))
        if name is None:
            continue
        kernels = portfolio.classes[name]
        for _, config in ranked(problem, gpu, kernels):
            estimated = card.name != gpu.name or name != own
            whose = f"class {name!r} of {card.name}"
            why = f"{whose}: the kernel that did best on the measured problems most like this one"
            if estimated:
                why += (
                    f"; not measured on {gpu.name}"
                    if card.name != gpu.name
                    else f"; head_dim {problem.head_dim} was not measured"
                )
            return Pick(config.family, config, why, estimated, None if estimated else kernels.regret, "portfolio")
    return None


def portfolio_kernels(problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """All kernels of the problem's class that can serve it, the most promising first: where a search of it begins."""
    for card in _cards(gpu):
        portfolio = shipped.load(card)
        if portfolio and (name := class_of(problem)) in portfolio.classes:
            return [config for _, config in ranked(problem, gpu, portfolio.classes[name])]
    return []
