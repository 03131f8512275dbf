"""The kernel that would run for a problem: of this architecture's portfolio, or of the nearest one's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from evoattn.families import registry
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio import shipped
from evoattn.portfolio.climbs import Climbs
from evoattn.portfolio.features import class_of
from evoattn.portfolio.known import visible
from evoattn.portfolio.refine import Genes, refined
from evoattn.portfolio.shipped import KernelClass, Portfolio
from evoattn.portfolio.unmeasured import changed, known_genes, known_good, spaces_for

REFINED_DIM = 256
"""The widest heads whose picks are refined. On 144 problems of wider ones, none of them in the cost model's fit, its
choice among all kernels that a search had timed takes 0.997 times as long as the class's, in 32 bits 1.010, and 1.2 and
1.4 times at worst."""
CHECKED_REGRET = 1.031
"""Geometric mean of the picks' times over those of searches from them, on 60 problems that nothing was made from
(docs/any_shape.md); not known by class."""


@dataclass(frozen=True)
class Pick:
    """One choice. `expected_regret` is a geometric mean of time over the best known: of its class on problems left out,
    or CHECKED_REGRET where the cost model has changed the class's kernel; None if unknown."""

    family: str
    config: KernelConfig
    why: str
    estimated: bool
    """No card of this kind was measured for this class: the choice may be slow."""
    expected_regret: float | None
    source: Literal["exact", "portfolio"]


@cache
def _portfolios(gpu: GpuSpec) -> list[Portfolio]:
    """The portfolios that may serve: of this architecture and of older ones, the newest first."""
    older = {g.arch: g.capability for g in GPUS.values() if g.capability <= gpu.capability} | {gpu.arch: gpu.capability}
    found = (shipped.load(arch) for arch in sorted(older, key=lambda arch: older[arch], reverse=True))
    return [portfolio for portfolio in found if portfolio]


@cache
def _classes_for(name: str, names: tuple[str, ...]) -> list[str]:
    """The class `name` and those of the same mask and size that have no variants but its own, the nearest first: of a
    head_dim that is not less, with most of its variants, and of the nearest head_dim."""
    bits, dim, mask, size = name.split()
    base, *variants = mask.split("+")
    found: list[tuple[bool, bool, int, int, str]] = []
    for other in names:
        other_bits, other_dim, other_mask, other_size = other.split()
        other_base, *others = other_mask.split("+")
        if (other_bits, other_base, other_size) == (bits, base, size) and set(others) <= set(variants):
            above = int(other_dim[1:]) - int(dim[1:])
            found.append((other != name, above < 0, -len(others), abs(above), other))
    return [entry[-1] for entry in sorted(found)]


def _predicted(problem: AttentionProblem, gpu: GpuSpec, kernels: KernelClass) -> list[float]:
    """The times of all that the class's kernels can run as."""
    alike = kernels.alike(problem, gpu)
    return [us for kernel in kernels.kernels for us in kernel.predicted_us(problem, gpu, alike)]


def ranked(problem: AttentionProblem, gpu: GpuSpec, kernels: KernelClass) -> Iterator[KernelConfig]:
    """The class's configs that can serve the problem, those first that should take least time: by the class's own
    constants, and of packed sequences and keys in use by the cost model as much. Both err in ways of their own: on 112
    problems that neither had seen the constants alone lose 1.063, the model alone 1.046, and both 1.044. No latent
    cache was among these, so that they keep to the constants."""
    configs = [config for kernel in kernels.kernels for config in kernel.variants()]
    seen = visible(problem)
    predicted = [_predicted(one, gpu, kernels) for one in seen]
    products = map(math.prod, zip(*predicted, strict=True))
    able = [
        (us, config)
        for us, config in zip(products, configs, strict=True)
        if not registry.lookup(config.family).why_impossible(problem, config, gpu)
    ]
    if (problem.varlen or problem.seqused) and not problem.shared_kv and len(able) > 1:
        from evoattn.cost.cost import scores  # here: it imports NumPy and reads a file

        costs = [scores(one, [config for _, config in able], gpu) for one in seen]
        factors = map(math.prod, zip(*costs, strict=True))
        able = [(us * factor, config) for (us, config), factor in zip(able, factors, strict=True)]
    yield from (config for _, config in sorted(able, key=lambda pair: pair[0]))


def pick(problem: AttentionProblem, gpu: GpuSpec, climbs: Climbs | None = None) -> Pick | None:
    """The kernel for `problem` on `gpu`, or None where no portfolio has one that can serve it.

    A GPU that was never measured takes the portfolio of its architecture, else of the nearest older one, a head_dim
    that was never measured that of the next wider one; such picks are `estimated`. So are those by the cost model
    alone: of plain attention of heads that are wider than all that were measured, and of families that serve variants
    alone. `climbs`: what earlier picks came to, those of this process unless given.
    """
    served = _served(problem, gpu)
    if not problem.variants and (served is None or served.narrower):
        return _beyond(problem, gpu, served.configs if served else [], climbs)
    if served is None:
        return _unmeasured(problem, gpu)
    config, why, regret = served.configs[0], served.why, served.regret
    as_is = not served.tried or problem.variants or problem.head_dim > REFINED_DIM
    better = None if as_is else refined(served.configs, problem, gpu, served.genes, climbs)
    if better and better.gain > 1:
        why += f"; by the cost model {1 - 1 / better.gain:.0%} less {_changed(config, better.config)}"
        config, regret = better.config, None if served.estimated else CHECKED_REGRET
    return Pick(config.family, config, why, served.estimated, regret, "portfolio")


def next_picks(problem: AttentionProblem, gpu: GpuSpec) -> Iterator[Pick]:
    """What to try where the pick cannot serve the problem as its tensors lie in memory: the kernels of its class, the
    most promising first, as they are."""
    if (served := _served(problem, gpu)) is not None:
        for config in served.configs:
            yield Pick(config.family, config, served.why, served.estimated, None, "portfolio")


@dataclass(frozen=True)
class _Served:
    """The nearest class with kernels that can serve a problem, and these, the most promising first."""

    configs: list[KernelConfig]
    why: str
    tried: bool
    """The card is one of those that the portfolio was judged on."""
    estimated: bool
    regret: float | None
    genes: Mapping[str, Genes]
    narrower: bool
    """The class is of a smaller head_dim."""


def _served(problem: AttentionProblem, gpu: GpuSpec) -> _Served | None:
    own = class_of(problem)
    for portfolio in _portfolios(gpu):
        for name in _classes_for(own, portfolio.classes):
            kernels = portfolio.kernel_class(name)
            if not (found := list(ranked(problem, gpu, kernels))):
                continue
            tried = gpu.name in portfolio.cards
            estimated = not tried or name != own
            why = (
                f"of the kernels of class '{name}' it should take least time here, by times that were measured on "
                f"{portfolio.measured_on}"
            )
            if not tried:
                why += f"; nothing was tried on {gpu.name}"
            elif estimated:
                same_mask = own.split()[2] == name.split()[2]
                why += f"; {f'head_dim {problem.head_dim}' if same_mask else own} was not measured"
            regret, narrower = None if estimated else kernels.regret, int(name.split()[1][1:]) < problem.head_dim
            return _Served(found, why, tried, estimated, regret, portfolio.genes, narrower)
    return None


def _changed(before: KernelConfig, after: KernelConfig) -> str:
    """What differs."""
    if before.family != after.family:
        return f"as {after.family}"
    differ = {name: value for name, value in after.params.items() if value != before.params[name]}
    return f"with {KernelConfig(after.family, differ).describe()}"


def _beyond(problem: AttentionProblem, gpu: GpuSpec, near: list[KernelConfig], climbs: Climbs | None) -> Pick | None:
    """Where climbs by the cost model end that begin at known-good configs and at kernels of a narrower class; None on
    a GPU of no portfolio."""
    if not (portfolios := _portfolios(gpu)):
        return None
    spaces = spaces_for(problem, gpu, plain=True)
    genes = known_genes(spaces, portfolios[0].genes)
    configs = [*near, *known_good(problem, gpu, spaces)] or changed(problem, gpu, spaces, genes)
    if not configs:
        return None
    found = refined(configs, problem, gpu, genes, climbs).config
    why = (
        "of the families' known-good configs and what changes of them come to it should take least time here by the "
        f"cost model; there is no class '{class_of(problem)}', nor one of a wider head"
    )
    return Pick(found.family, found, why, True, None, "portfolio")


def _unmeasured(problem: AttentionProblem, gpu: GpuSpec) -> Pick | None:
    """A starting config of the families that serve variants alone, which no portfolio has: the cost model's choice."""
    if not (configs := known_good(problem, gpu, spaces_for(problem, gpu, plain=False))):
        return None
    from evoattn.cost.cost import scores  # here: few problems need it, and it imports NumPy and reads a file

    ranked_by = dict(zip((config.id for config in configs), scores(problem, configs, gpu), strict=True))
    best = min(configs, key=lambda config: ranked_by[config.id])
    why = "of its family's starting configs it should take least time here by the cost model; none was measured"
    return Pick(best.family, best, why, True, None, "portfolio")


def class_kernels(problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """All kernels of the problem's class, else of the nearest one, that can serve it, the most promising first."""
    served = _served(problem, gpu)
    return served.configs if served else []


def portfolio_kernels(problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """The pick, then the kernels of its class (`class_kernels`): where a search of the problem begins."""
    found, picked = class_kernels(problem, gpu), pick(problem, gpu)
    first = [picked.config] if picked else []
    return first + [config for config in found if config not in first]


def climbing_genes(gpu: GpuSpec) -> Mapping[str, Genes]:
    """By family: the values that a climb from a pick may take on the GPU."""
    return next((portfolio.genes for portfolio in _portfolios(gpu)), {})
