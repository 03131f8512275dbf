"""The kernel that would run for a problem: the kernels of a short list that can serve it are ranked by the cost model,
and climbs from the best of them go on to what fits the problem."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product

from evoattn.cost import correction
from evoattn.families import registry
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.played import is_played
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, SearchSpace, load_space
from evoattn.portfolio import calibrations
from evoattn.portfolio.canonical import canonical, likely
from evoattn.portfolio.climb import MOST_KEPT, ClimbCache, Costs, climbed, neighbours
from evoattn.portfolio.kernels import Genes, KernelList, kind_of, load

MOST_CHANGED = 60
"""Changes of known-good configs that are looked at where no such config can serve a problem; each is scored in some
0.15 ms."""
SPLITS, NUMBERS = "SPLITS", (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Blocks that share the keys of the same rows."""
MOST_RANKED = 24
"""Kernels where a search may begin."""
IN_MEMORY = ClimbCache()
"""What climbs of this process came to."""


@cache
def list_for(gpu: GpuSpec) -> KernelList | None:
    """What a calibration of the card found, else `shipped_for`."""
    found = calibrations.of_card(gpu)
    return found.current_list() if found else shipped_for(gpu)


def shipped_for(gpu: GpuSpec) -> KernelList | None:
    """The list of the GPU's architecture, else of the newest older one that has a list, else of the oldest newer one;
    None where there is none."""
    if is_played(gpu):
        return None
    known = {g.arch: g.capability for g in GPUS.values()} | {gpu.arch: gpu.capability}
    older = sorted(
        (arch for arch in known if known[arch] <= gpu.capability), key=lambda arch: known[arch], reverse=True
    )
    newer = sorted((arch for arch in known if known[arch] > gpu.capability), key=lambda arch: known[arch])
    return next((one for one in map(load, (*older, *newer)) if one), None)


@dataclass(frozen=True)
class Pick:
    """One choice. `expected_regret` is its time over the best of a search, geometric mean of problems left out; None
    if unknown."""

    family: str
    config: KernelConfig
    why: str
    estimated: bool
    """No kernel was timed on such a card for such a problem: the choice may be slow."""
    expected_regret: float | None


def pick(problem: AttentionProblem, gpu: GpuSpec, climbs: ClimbCache | None = None) -> Pick | None:
    """The kernel for `problem` on `gpu`, or None where no family has one, or PyTorch's own attention was faster.

    Picks on a card that was not measured, or for a kind of problem that was not (`kernels.kind_of`), are `estimated`.
    `climbs`: what earlier picks came to, those of this process unless given.
    """
    found = lasting_pick(problem, gpu, climbs)
    if found and registry.lookup(found.family).why_impossible(problem, found.config, gpu):
        return next(next_picks(problem, gpu), None)
    return found


def lasting_pick(problem: AttentionProblem, gpu: GpuSpec, climbs: ClimbCache | None = None) -> Pick | None:
    """As `pick`, but seldom one that cannot serve the very lengths: the choice is made for rounded ones, and kept."""
    return _kept(canonical(problem), gpu, IN_MEMORY if climbs is None else climbs)


def forget() -> None:
    """Have picks made anew: a calibration has come or gone."""
    correction.forget()
    list_for.cache_clear()
    _kept.cache_clear()
    IN_MEMORY.forget()


@lru_cache(MOST_KEPT)
def _kept(about: AttentionProblem, gpu: GpuSpec, climbs: ClimbCache) -> Pick | None:
    """The pick for a canonical problem."""
    listed = list_for(gpu)
    if listed and not about.batch_invariant and any(one.covers(about) for one in listed.skipped):
        return None
    if (end := climbs.get((about, gpu))) is None:
        kernels, genes = _begin(about, gpu, listed)
        if not kernels:
            return None
        is_listed = listed and gpu.name in listed.cards and not about.batch_invariant
        timed = _split(listed.of(about)[0], about, gpu) if listed and is_listed else ()
        end = climbed(kernels, about, gpu, genes, timed)
        climbs.add((about, gpu), end)
    why = f"of {_begun(listed)} it should take least time here by the cost model"
    if end.gain > 1:
        saved = f"{1 - 1 / end.gain:.0%}"
        why = f"it changes the best of {_begun(listed)}, and should take {saved} less time here by the cost model"
    return _pick(end.config, why, about, gpu, listed)


def _begun(listed: KernelList | None) -> str:
    if listed is None:
        return "the families' known-good configs"
    return f"the kernels that were fast on {' and '.join(listed.cards)}"


def _pick(config: KernelConfig, why: str, problem: AttentionProblem, gpu: GpuSpec, listed: KernelList | None) -> Pick:
    if listed is None or gpu.name not in listed.cards:
        return Pick(config.family, config, f"{why}; nothing was timed on {gpu.name}", True, None)
    if kind_of(problem) not in listed.kinds:
        return Pick(
            config.family, config, f"{why}; no problem of its kind, '{kind_of(problem)}', was timed", True, None
        )
    return Pick(config.family, config, why, False, listed.regret_of(problem))


def _begin(
    problem: AttentionProblem, gpu: GpuSpec, listed: KernelList | None
) -> tuple[list[KernelConfig], Mapping[str, Genes]]:
    """The kernels that climbs begin at, and by family the values that genes may take: those of the list, and where it
    was not made for such a card or problem the known-good configs of all families, too."""
    if problem.batch_invariant:
        return _by_recipe(problem, gpu, listed)
    able = [c for c in _split(listed.of(problem)[1], problem, gpu) if _can_run(c, problem, gpu)] if listed else []
    genes: dict[str, Genes] = dict(listed.genes) if listed else {}
    if able and listed and gpu.name in listed.cards and kind_of(problem) in listed.kinds:
        return able, genes
    serving = (f.name for f in registry.FAMILIES.values() if not f.why_unsupported(problem, gpu))
    spaces = {name: load_space(name, gpu) for name in serving}
    genes |= {name: _known_genes(space, genes.get(name, {})) for name, space in spaces.items()}
    if listed and gpu.name not in listed.cards:
        able = _of_another_card([*able, *listed.kernels], spaces, problem, gpu)
    known = [c for space in spaces.values() for c in space.starting_configs() if _can_run(c, problem, gpu)]
    found = {config.id: config for config in [*able, *known]} or {
        config.id: config
        for space in spaces.values()
        for start in space.starting_configs()
        for config in neighbours(start, problem, gpu, genes[space.family])
    }
    configs = list(found.values())
    apart = 1 if able or known or not configs else math.ceil(len(configs) / MOST_CHANGED)
    return configs[::apart], genes


def _by_recipe(
    problem: AttentionProblem, gpu: GpuSpec, listed: KernelList | None
) -> tuple[list[KernelConfig], Mapping[str, Genes]]:
    """As `_begin`, of rows that have the same bits in every batch: the list's kernels and the known-good configs of the
    one family that has a recipe, with its genes in place of theirs; genes that these kernels all have alike have any
    value."""
    found: dict[str, KernelConfig] = {}
    genes: dict[str, Genes] = {}
    for family in registry.FAMILIES.values():
        if family.why_unsupported(problem, gpu) or not (recipe := family.recipe(problem, gpu)):
            continue
        space = load_space(family.name, gpu)
        kernels = (
            [c for c in listed.of(problem)[1] if c.family == family.name and space.has(c.params)] if listed else []
        )
        known = _known_genes(space, listed.genes.get(family.name, {}) if listed else {})
        alike = {p.name: p.values for p in space.parameters if len(known[p.name]) == 1 and p.name not in recipe}
        others = [{name: value} for name, values in alike.items() for value in values]
        for kernel, other in product((*kernels, *space.starting_configs()), ({}, *others)):
            config = KernelConfig(family.name, {**kernel.params, **recipe, **other})
            if not family.why_impossible(problem, config, gpu):
                found[config.id] = config
        genes[family.name] = {**known, **alike, **{name: (value,) for name, value in recipe.items()}}
    return list(found.values()), genes


def _of_another_card(
    kernels: Sequence[KernelConfig], spaces: Mapping[str, SearchSpace], problem: AttentionProblem, gpu: GpuSpec
) -> list[KernelConfig]:
    """Those that this card's families have, too. Of 100 problems on each of ten cards the choice among these and the
    families' own configs scores 0.97 times the best of them all, in the mean (`benchmarks/cards/picks.py`)."""
    same = (c for c in kernels if c.family in spaces and spaces[c.family].has(c.params))
    return [c for c in same if _can_run(c, problem, gpu)]


def _splits_at_launch(config: KernelConfig) -> bool:
    """Whether the number of splits is an argument of the launch, so that one compiled kernel serves all."""
    return SPLITS in config.params and config.params.get("MERGE") != "cluster"


def whole(config: KernelConfig) -> KernelConfig:
    """The config without splits, if their number is an argument of the launch: how lists have it."""
    return KernelConfig(config.family, config.params | {SPLITS: 1}) if _splits_at_launch(config) else config


def _split(kernels: Sequence[KernelConfig], problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """The kernels, those whose number of splits is an argument of the launch with the numbers of blocks that the SMs
    have room for: the greatest that all run at once, and the next."""
    found: dict[str, KernelConfig] = {}
    for config in kernels:
        if not _splits_at_launch(config):
            found[config.id] = config
            continue
        if _can_run(one := whole(config), problem, gpu):
            blocks = registry.lookup(config.family).work(problem, one)[0].blocks
            room = gpu.sm_count * int(config.params.get("BLOCKS_PER_SM", 1)) / blocks
            fewer = [n for n in NUMBERS if n <= room] or NUMBERS[:1]
            for splits in (fewer[-1], *NUMBERS[len(fewer) : len(fewer) + 1]):
                made = KernelConfig(config.family, config.params | {SPLITS: splits})
                found[made.id] = made
    return list(found.values())


def _known_genes(space: SearchSpace, genes: Genes) -> Genes:
    """The values of `genes` that the space has, and those that a known-good config has."""
    return {
        p.name: [
            value
            for value in dict.fromkeys([*genes.get(p.name, ()), *(row[p.name] for row in space.starting)])
            if value in p.values
        ]
        for p in space.parameters
    }


def _can_run(config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> bool:
    return not registry.lookup(config.family).why_impossible(problem, config, gpu)


def ranked(problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """The kernels that a pick's climbs begin at and that can serve the very problem, the most promising first."""
    kernels, _ = _begin(problem, gpu, list_for(gpu))
    scored = Costs(likely(problem), gpu).of(kernels)
    return [one.config for one in sorted(scored, key=lambda one: one.score)]


def next_picks(problem: AttentionProblem, gpu: GpuSpec) -> Iterator[Pick]:
    """What to try where the pick cannot serve the problem as its tensors lie in memory, the most promising first."""
    listed = list_for(gpu)
    for config in ranked(problem, gpu):
        yield _pick(config, f"of {_begun(listed)} it comes next by the cost model", problem, gpu, listed)


def portfolio_kernels(problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """The pick, then the most promising kernels that its climbs begin at: where a search of the problem begins. Empty
    where there is no pick."""
    if (picked := pick(problem, gpu)) is None:
        return []
    return [picked.config, *(c for c in ranked(problem, gpu) if c != picked.config)][:MOST_RANKED]
