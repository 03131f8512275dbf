"""The kernel that would run for a problem: of this architecture's portfolio, or of the nearest one's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from evoattn.families import registry
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.portfolio.climbs import MOST_KEPT, Climbs
from evoattn.portfolio.features import class_of
from evoattn.portfolio.growing import climbs_end
from evoattn.portfolio.nearest import nearest, portfolios
from evoattn.portfolio.refine import IN_MEMORY, Genes
from evoattn.portfolio.rounding import lasting
from evoattn.portfolio.unmeasured import changed, known_genes, known_good, spaces_for

REFINED_DIM = 256
"""The widest heads whose picks are refined. On 144 problems of wider ones, none of them in the cost model's fit, its
choice among all kernels that a search had timed takes 0.997 times as long as the class's, in 32 bits 1.010, and 1.2 and
1.4 times at worst."""
CHECKED_REGRET = 1.021
"""Geometric mean of the picks' times over those of searches from them, on 80 problems that nothing was made from
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


def pick(problem: AttentionProblem, gpu: GpuSpec, climbs: Climbs | None = None) -> Pick | None:
    """The kernel for `problem` on `gpu`, or None where no portfolio has one that can serve it.

    A GPU that was never measured takes the portfolio of its architecture, else of the nearest older one, a head_dim
    that was never measured that of the next wider one; such picks are `estimated`. So are those by the cost model
    alone: of plain attention of heads that are wider than all that were measured, and of families that serve variants
    alone. `climbs`: what earlier picks came to, those of this process unless given.
    """
    found, climbs = lasting_pick(problem, gpu, climbs), IN_MEMORY if climbs is None else climbs
    if found and registry.lookup(found.family).why_impossible(problem, found.config, gpu):
        return _pick(problem, gpu, climbs)
    return found


def lasting_pick(problem: AttentionProblem, gpu: GpuSpec, climbs: Climbs | None = None) -> Pick | None:
    """As `pick`, but seldom one that cannot serve the very lengths: with few queries the keys are rounded, so that each
    token over a cache that grows costs a look-up."""
    return _kept(lasting(problem), gpu, IN_MEMORY if climbs is None else climbs)


def _pick(problem: AttentionProblem, gpu: GpuSpec, climbs: Climbs) -> Pick | None:
    """As `pick`, for these very lengths."""
    served = nearest(problem, gpu)
    if not problem.variants and (served is None or served.narrower):
        return _beyond(problem, gpu, climbs)
    if served is None:
        return _unmeasured(problem, gpu)
    config, why, regret = served.configs[0], served.why, served.regret
    if served.as_is or problem.head_dim > REFINED_DIM:
        return Pick(config.family, config, why, served.estimated, regret)
    better = climbs_end(_of_class, served.configs, problem, gpu, served.genes, climbs)
    if better.gain > 1 and better.config != config:
        why += f"; by the cost model {1 - 1 / better.gain:.0%} less {_changed(config, better.config)}"
        config, regret = better.config, None if served.estimated else CHECKED_REGRET
    return Pick(config.family, config, why, served.estimated, regret)


_kept = lru_cache(MOST_KEPT)(_pick)
"""Of the problems that were picked for last."""


def next_picks(problem: AttentionProblem, gpu: GpuSpec) -> Iterator[Pick]:
    """What to try where the pick cannot serve the problem as its tensors lie in memory: the kernels of its class, the
    most promising first, as they are."""
    if (served := nearest(problem, gpu)) is not None:
        for config in served.configs:
            yield Pick(config.family, config, served.why, served.estimated, None)


def _changed(before: KernelConfig, after: KernelConfig) -> str:
    """What differs."""
    if before.family != after.family:
        return f"as {after.family}"
    differ = {name: value for name, value in after.params.items() if value != before.params[name]}
    return f"with {KernelConfig(after.family, differ).describe()}"


def _beyond(problem: AttentionProblem, gpu: GpuSpec, climbs: Climbs) -> Pick | None:
    """Where climbs by the cost model end that begin at known-good configs and at kernels of a narrower class; None on
    a GPU of no portfolio."""
    configs, genes = _known(problem, gpu)
    if not configs:
        return None
    found = climbs_end(_known, configs, problem, gpu, genes, climbs).config
    why = (
        "of the families' known-good configs and what changes of them come to it should take least time here by the "
        f"cost model; there is no class '{class_of(problem)}', nor one of a wider head"
    )
    return Pick(found.family, found, why, True, None)


def _known(problem: AttentionProblem, gpu: GpuSpec) -> tuple[list[KernelConfig], Mapping[str, Genes]]:
    """What `_beyond` begins at: see `growing.Begin`."""
    if not (found := portfolios(gpu)):
        return [], {}
    served, spaces = nearest(problem, gpu), spaces_for(problem, gpu, plain=True)
    genes = known_genes(spaces, found[0].genes)
    near = served.configs if served else []
    return [*near, *known_good(problem, gpu, spaces)] or changed(problem, gpu, spaces, genes), genes


def _of_class(problem: AttentionProblem, gpu: GpuSpec) -> tuple[list[KernelConfig], Mapping[str, Genes]]:
    """What the climbs of a class begin at: see `growing.Begin`."""
    served = nearest(problem, gpu)
    return (served.configs, served.genes) if served else ([], {})


def _unmeasured(problem: AttentionProblem, gpu: GpuSpec) -> Pick | None:
    """A starting config of the families that serve variants alone, which no portfolio has: the cost model's choice."""
    if not (configs := known_good(problem, gpu, spaces_for(problem, gpu, plain=False))):
        return None
    from evoattn.cost.cost import scores  # here: few problems need it, and it imports NumPy and reads a file

    ranked_by = dict(zip((config.id for config in configs), scores(problem, configs, gpu), strict=True))
    best = min(configs, key=lambda config: ranked_by[config.id])
    why = "of its family's starting configs it should take least time here by the cost model; none was measured"
    return Pick(best.family, best, why, True, None)


def class_kernels(problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """All kernels of the problem's class, else of the nearest one, that can serve it, the most promising first."""
    served = nearest(problem, gpu)
    return served.configs if served else []


def portfolio_kernels(problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """The pick, then the kernels of its class (`class_kernels`): where a search of the problem begins."""
    found, picked = class_kernels(problem, gpu), pick(problem, gpu)
    first = [picked.config] if picked else []
    return first + [config for config in found if config not in first]


def climbing_genes(gpu: GpuSpec) -> Mapping[str, Genes]:
    """By family: the values that a climb from a pick may take on the GPU."""
    return next((portfolio.genes for portfolio in portfolios(gpu)), {})
