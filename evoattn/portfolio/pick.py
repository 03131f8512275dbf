"""The kernel that would run for a problem: the kernels of a short list that can serve it are ranked by the cost model,
and climbs from the best of them go on to what fits the problem. A pick is made for a problem in place of the very one:
what a caller knows without waiting for the device, with lengths rounded, so that a sequence that grows keeps its kernel
for some while."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain, product

from evoattn.cost import correction
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.backward import parse_grads
from evoattn.model.block_list import parse_blocks
from evoattn.model.gpu import GPUS, GpuSpec
from evoattn.model.gpu_table import is_played
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.score import parse_tables
from evoattn.model.sequences import PACKED_PARTS, power_below, rounded_up
from evoattn.model.space import KernelConfig, SearchSpace
from evoattn.portfolio import calibrations
from evoattn.portfolio.climb import MOST_KEPT, ClimbCache, Costs, climbed, neighbours
from evoattn.portfolio.kernels import Genes, KernelList, load

MOST_CHANGED = 60
"""Changes of known-good configs that are looked at where no such config can serve a problem; each is scored in some
0.15 ms."""
SPLITS = "SPLITS"
"""Blocks that share the keys of the same rows."""
OTHER_SPLITS = 1.5, 2.0, 1 / 1.5
"""Times a pick's number of splits: the nearest of these race it, too, where they need no compiler. On 19 latent caches
first choices lose 1.005 so (1.03 at worst), and without them 1.046 (1.26); on 27 other decodes 1.010 (1.06) and 1.024
(1.40): every number timed on an H200, 2026-11-29."""
ANY_VALUE = ("KEY_SPLIT",)
"""Genes that may have any value on cards that were not measured. As an A100, of 12 problems of few queries or tiles the
cost model orders the numbers of blocks that share keys as the fastest kernels with each (reports/performance.md,
2026-11-27, seventh session); known-good configs have 1 and 4."""
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
    estimated: bool = False
    """No kernel was timed on such a card for such a problem: the choice may be slow."""
    expected_regret: float | None = None
    rivals: tuple[KernelConfig, ...] = ()
    """Other kernels that may be faster, and are worth a race."""


def pick(problem: AttentionProblem, gpu: GpuSpec, climbs: ClimbCache | None = None) -> Pick | None:
    """The kernel for `problem` on `gpu`, or None where no family has one, or PyTorch's own attention was faster.

    Picks on a card that was not measured, or for a kind of problem that was not (`KernelList.kind_of`), are
    `estimated`. `climbs`: what earlier picks came to, those of this process unless given."""
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
    _genes_of.cache_clear()
    IN_MEMORY.forget()


@lru_cache(MOST_KEPT)
def _kept(about: AttentionProblem, gpu: GpuSpec, climbs: ClimbCache) -> Pick | None:
    """The pick for a canonical problem."""
    listed = list_for(gpu)
    if listed and not about.batch_invariant and any(one.covers(about) for one in listed.skipped):
        return None
    if (end := climbs.get((about, gpu))) is None:
        kernels, genes, timed = _begin(about, gpu, listed)
        kernels += _over_eight_bits(about, gpu, climbs)
        if not kernels:
            return None
        end = climbed(kernels, about, gpu, genes, timed, filled(about))
        climbs.add((about, gpu), end)
    why = f"of {_begun(listed)} it should take least time here by the cost model"
    if end.gain > 1:
        saved = f"{1 - 1 / end.gain:.0%}"
        why = f"it changes the best of {_begun(listed)}, and should take {saved} less time here by the cost model"
    others = *_over_eight_bits(about, gpu, climbs), *end.rivals, *_other_splits(end.config, about, gpu)
    rivals = {one.id: one for one in others if one.id != end.config.id}
    return replace(_pick(end.config, why, about, gpu, listed), rivals=tuple(rivals.values()))


def _over_eight_bits(problem: AttentionProblem, gpu: GpuSpec, climbs: ClimbCache) -> list[KernelConfig]:
    """Over a cache of 8 bits what the pick over one of 16 becomes. Of 13 short caches on an H200 the pick took 1.130
    times that pick's time, the faster of both 1.038 (2026-11-29)."""
    if not problem.kv or problem.shared_kv or problem.rotary_apart:
        return []
    wide = None if problem.batch_invariant else _kept(canonical(problem.with_(kv="", scales="")), gpu, climbs)
    found = wide and registry.lookup(wide.family).over_eight_bits(problem, wide.config, gpu)
    return [found] if found and _can_run(found, problem, gpu) else []


def _begun(listed: KernelList | None) -> str:
    if listed is None:
        return "the families' known-good configs"
    return f"the kernels that were fast on {' and '.join(listed.cards)}"


def _pick(config: KernelConfig, why: str, problem: AttentionProblem, gpu: GpuSpec, listed: KernelList | None) -> Pick:
    if listed is None or gpu.name not in listed.cards:
        return Pick(config.family, config, f"{why}; nothing was timed on {gpu.name}", True, None)
    if (kind := listed.kind_of(problem)) not in listed.kinds:
        return Pick(config.family, config, f"{why}; no problem of its kind, '{kind}', was timed", True, None)
    return Pick(config.family, config, why, False, listed.regret_of(problem))


def _begin(
    problem: AttentionProblem, gpu: GpuSpec, listed: KernelList | None
) -> tuple[list[KernelConfig], Mapping[str, Genes], list[KernelConfig]]:
    """The kernels that climbs begin at, by family the values that genes may take, and what was fast on such problems
    and cards, whether it can run here or not: kernels and genes are those of the list, and where it was not made for
    such a card or problem the known-good configs of all families that may win it, too."""
    if problem.batch_invariant:
        return *_by_recipe(problem, gpu, listed), []
    fast, every = listed.of(problem) if listed else ([], [])
    if listed and not any(registry.lookup(c.family).may_win(problem) for c in every):  # timed for fewer queries alone
        every += [listed.kernels[i] for i in listed.general]
    split = [_split(config, problem, gpu) for config in every]
    able = [c for c in chain.from_iterable(split) if _can_run(c, problem, gpu)]
    genes = dict(_genes_of(listed)) if listed else {}
    timed = list[KernelConfig]()
    if listed and gpu.name in listed.cards:
        others = _of_lists(problem, gpu)
        timed = [*chain.from_iterable(split[: len(fast)]), *others]
        if able and listed.kind_of(problem) in listed.kinds:
            return list({c.id: c for c in [*able, *others]}.values()), genes, timed
    serving = (f.name for f in registry.FAMILIES.values() if not f.why_unsupported(problem, gpu))
    spaces = {name: load_space(name, gpu) for name in serving}
    any_value = () if listed and gpu.name in listed.cards else ANY_VALUE
    genes |= {name: _known_genes(space, genes.get(name, {}), any_value) for name, space in spaces.items()}
    if listed and gpu.name not in listed.cards:
        able = _of_another_card([*able, *listed.kernels], spaces, problem, gpu)
    known = [c for space in spaces.values() for c in space.starting_configs() if _can_run(c, problem, gpu)]
    known = [c for c in known if registry.lookup(c.family).may_win(problem)] or known
    found = {config.id: config for config in [*able, *known]} or {
        config.id: config
        for space in spaces.values()
        for start in space.starting_configs()
        for config in neighbours(start, problem, gpu, genes[space.family])
    }
    configs = list(found.values())
    apart = 1 if able or known or not configs else math.ceil(len(configs) / MOST_CHANGED)
    return configs[::apart], genes, timed


def _of_lists(problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """Known-good configs for a problem with a block list, else none: see `Family.known_for_lists`."""
    if not problem.blocks or problem.op != "forward":
        return []
    spaces = (load_space(f.name, gpu) for f in registry.FAMILIES.values() if f.known_for_lists)
    return [c for space in spaces for c in space.starting_configs() if _can_run(c, problem, gpu)]


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
        known = _known_genes(space, listed.genes.get(family.name, {}) if listed else {}, ("KEY_SPLIT",))
        alike = {p.name: p.values for p in space.parameters if len(known[p.name]) == 1 and p.name not in recipe}
        others = [{name: value} for name, values in alike.items() for value in values]
        for kernel, other in product((*kernels, *space.starting_configs()), ({}, *others)):
            params = {**kernel.params, **recipe, **other}
            # Sums of parts may leave shared memory for fewer stages.
            for stages in range(int(params.get("STAGES", 0)), -1, -1):
                config = KernelConfig(family.name, params | {"STAGES": stages} if stages else params)
                if not family.why_impossible(problem, config, gpu):
                    found[config.id] = config
                    break
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


def of_its_code(config: KernelConfig) -> list[KernelConfig]:
    """Configs that launch all that its machine code has: with the most splits and with none, if their number is an
    argument of the launch, else the config itself."""
    if not _splits_at_launch(config):
        return [config]
    most = _numbers_of_splits(config.family)[-1]
    return [KernelConfig(config.family, config.params | {SPLITS: splits}) for splits in (most, 1)]


@cache
def _numbers_of_splits(family: str) -> tuple[int, ...]:
    """All that a family knows."""
    known = next(p.values for p in registry.lookup(family).genes.parameters() if p.name == SPLITS)
    return tuple(int(number) for number in known)


@cache
def _genes_of(listed: KernelList) -> dict[str, Genes]:
    """Values of a list's genes, and any number of splits: mostly it is an argument of the launch, and of a cluster the
    family says what may be. For 12 blocks a pick had 9 splits, as its list had no 11: 94 µs in place of 82 (a latent
    cache on an H200, 2026-11-29)."""
    return {
        name: {**genes, SPLITS: _numbers_of_splits(name)} if SPLITS in genes and name in registry.FAMILIES else genes
        for name, genes in listed.genes.items()
    }


def _other_splits(config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """The same machine code with other numbers of splits: keys in use are seldom as many as is guessed."""
    if not _splits_at_launch(config):
        return []
    family, own, found = registry.lookup(config.family), int(config[SPLITS]), dict[str, KernelConfig]()
    made = {n: KernelConfig(config.family, config.params | {SPLITS: n}) for n in _numbers_of_splits(config.family)}
    for about in (own * factor for factor in OTHER_SPLITS):
        nearest = sorted((abs(math.log(n / about)), n) for n in made if (n > own if about > own else n < own))
        able = (made[n] for _, n in nearest if not family.why_invalid(problem, made[n], gpu))
        if one := next((one for one in able if one.id not in found), None):
            found[one.id] = one
    return list(found.values())


def whole(config: KernelConfig) -> KernelConfig:
    """The config without splits, if their number is an argument of the launch: how lists have it."""
    return KernelConfig(config.family, config.params | {SPLITS: 1}) if _splits_at_launch(config) else config


def _split(config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """The kernel; if its number of splits is an argument of the launch, with the numbers of blocks that the SMs have
    room for: the greatest that all run at once, and the next."""
    if not _splits_at_launch(config):
        return [config]
    if not _can_run(one := whole(config), problem, gpu):
        return []
    blocks = registry.lookup(config.family).work(problem, one)[0].blocks
    room = gpu.sm_count * int(config.params.get("BLOCKS_PER_SM", 1)) / blocks
    known = _numbers_of_splits(config.family)
    fewer = [n for n in known if n <= room] or known[:1]
    numbers = fewer[-1], *known[len(fewer) : len(fewer) + 1]
    return [KernelConfig(config.family, config.params | {SPLITS: splits}) for splits in numbers]


def _known_genes(space: SearchSpace, genes: Genes, any_value: Sequence[str] = ()) -> Genes:
    """The values of `genes` that the space has, and those that a known-good config has; all of genes of `any_value`."""
    return {
        p.name: [
            value
            for value in dict.fromkeys([*genes.get(p.name, ()), *(row[p.name] for row in space.starting)])
            if value in p.values
        ]
        if p.name not in any_value
        else p.values
        for p in space.parameters
    }


def _can_run(config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> bool:
    return not registry.lookup(config.family).why_impossible(problem, config, gpu)


def ranked(problem: AttentionProblem, gpu: GpuSpec) -> list[KernelConfig]:
    """The kernels that a pick's climbs begin at and that can serve the very problem, the most promising first."""
    kernels, *_ = _begin(problem, gpu, list_for(gpu))
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


FEW_QUERIES = 16
FINE, PARTS = 4, 64
"""Lengths are rounded up to multiples of FINE, and of the power of two that is a PARTS-th of them at most. On 60
problems that costs nothing; 16 and 32 cost 0.6 % (26 % at worst, a tile more)."""
LEAST_STEP, STEP, STEPS = 16, 64, 8
"""Between numbers of keys where there are few queries: STEP, but a STEPS-th of the power of two below at least and this
power at most. Of 90 drawn problems the end of a climb for the next such number scores 0.06 % more than the better one
of the two nearest ones (3.3 % at worst), with steps of 128 and a quarter 0.3 % (22.6 %)."""
SPREAD = 64
"""Of the lengths of packed sequences about their mean, so that the last tile of one is half full in the mean. On 155
problems of three campaigns the cost model's choice loses 1.051 so, 1.062 with equal lengths, 1.041 with the true ones.
"""
IN_PAGES = 16
"""Of packed single tokens over pages the longest sequence is taken to have so many times as many keys as the shortest,
with logarithms spread evenly: a block alone with the longest may take longer than all others."""
OF_STEPS = 64
"""Of keys that there is room for, of single tokens beside prompts: the shortest has such a part, the longest three
quarters, which a token alone has, and prompts twice as many keys as rows. Of six kernels for each of 52 steps on an
H100 the choice takes 1.057 times the best one's time so, 1.063 with a sixteenth and all of the room."""
MOST_LISTED = 512
"""Sequences of a step whose likely lengths are listed."""
LEAST_USED = 0.1
"""Of the keys that there is room for. On 414 problems of the same campaigns the cost model's choice loses 1.059 with
lengths spread from a tenth to all, 1.064 from a quarter, 1.066 with half and all of them, 1.035 with the true ones."""


def is_few(problem: AttentionProblem) -> bool:
    """Whether keys are read for few queries, as for a token over a cache that grows."""
    return problem.seqlen_q <= FEW_QUERIES


def likely(problem: AttentionProblem) -> AttentionProblem:
    """The problem with lengths in place of those that only the device knows.

    Lengths of packed sequences and numbers of keys in use are data of the device. Known are how many sequences there
    are, the longest that they may be, and of packed ones how many rows they have together. So a choice is the same
    whatever the lengths are that a problem records."""
    if problem.varlen:
        sides = ((problem.head_rows[0], problem.seqlen_q), (_rows_of_keys(problem), problem.seqlen_k))
        return problem.with_(varlen=_spread(problem, *sides))
    if problem.seqused:
        least = max(math.ceil(LEAST_USED * problem.seqlen_k), problem.seqlen_q if problem.causal else 1)
        return problem.with_(seqused=f"{min(least, problem.seqlen_k)}:{problem.seqlen_k}")
    return problem


def filled(problem: AttentionProblem) -> AttentionProblem | None:
    """The problem with all keys in use that there is room for; None where how many are is known."""
    most = f"{problem.seqlen_k}:{problem.seqlen_k}"
    if problem.varlen and problem.page:
        return problem.with_(varlen=f"{problem.varlen.partition('/')[0]}/{most}")
    return problem.with_(seqused=most) if problem.seqused else None


def canonical(problem: AttentionProblem) -> AttentionProblem:
    """The `likely` problem with lengths rounded up, and without sizes of tables and small differences of block lists;
    itself where that would be too large."""
    try:
        problem = _without_sizes(problem)
        if problem.varlen:
            return _packed(problem)
        queries, keys = problem.seqlen_q, problem.seqlen_k
        if is_few(problem):
            step = max(LEAST_STEP, min(STEP, power_below(keys)), power_below(keys) // STEPS)
            keys = -(-keys // step) * step
        else:
            queries, keys = rounded_up(queries, FINE, PARTS), rounded_up(keys, FINE, PARTS)
        used = {"seqused": f"0:{keys}"} if problem.seqused else {}
        return likely(problem.with_(seqlen_q=queries, seqlen_k=keys, **used))
    except ProblemError:
        return problem


def size_class(problem: AttentionProblem) -> AttentionProblem:
    """The `canonical` problem, lengths of many queries rounded to one of eight numbers between two powers of two: of
    such a size one race is enough."""
    about = canonical(problem)
    if is_few(about) or about.varlen:
        return about
    queries, keys = (rounded_up(length, FINE, PACKED_PARTS) for length in (about.seqlen_q, about.seqlen_k))
    used = {"seqused": f"0:{keys}"} if about.seqused else {}
    try:
        return likely(about.with_(seqlen_q=queries, seqlen_k=keys, **used))
    except ProblemError:
        return about


def _nearest_power(number: float) -> int:
    """Of two, 1 or more."""
    return 1 << max(0, round(math.log2(max(number, 1))))


def _without_sizes(problem: AttentionProblem) -> AttentionProblem:
    """The problem with tables of one element, on whose sizes no kernel depends, but where several scores may be of an
    element that has a deterministic gradient, and with numbers of listed blocks that are powers of two in the mean, and
    so many times that at most."""
    changed: dict[str, str] = {}
    if problem.tables:
        sized = parse_grads(problem.grads) if problem.deterministic else ()
        tables = (
            table._replace(shape=tuple(rounded_up(n, FINE, PARTS) if table.buffer in sized else 1 for n in table.shape))
            for table in parse_tables(problem.tables)
        )
        changed["tables"] = "+".join(table.describe() for table in tables)
    mask = parse_blocks(problem.blocks) if problem.blocks else None
    if mask is not None and not mask.documents and not mask.mixed:
        partial, full = (count and _nearest_power(count) for count in mask.counts[:2])
        most = _nearest_power(mask.counts[2] / max(1, sum(mask.counts[:2]))) * (partial + full)
        head, _, _ = problem.blocks.rpartition(":")
        changed["blocks"] = f"{head}:{partial}/{full}/{max(1, most)}"
    return problem.with_(**changed) if changed else problem


def grown(problem: AttentionProblem, most_keys: int) -> Iterator[AttentionProblem]:
    """The problem, and those with more keys, up to `most_keys`, at which a pick for it may change: one for each number
    that keys are rounded to. Raises `ProblemError` where a problem cannot have so many."""
    yield problem
    last = canonical(problem).seqlen_k
    while last < most_keys:
        problem = problem.with_(seqlen_k=last + 1)
        yield problem
        last = max(last + 1, canonical(problem).seqlen_k)


def _packed(problem: AttentionProblem) -> AttentionProblem:
    batch, *longest = (rounded_up(n, 1, PACKED_PARTS) for n in (problem.batch, problem.seqlen_q, problem.seqlen_k))
    rows = problem.head_rows[0], _rows_of_keys(problem)
    rounded = (min(rounded_up(one, 1, PACKED_PARTS), batch * most) for one, most in zip(rows, longest))
    lengths = _spread(problem, *zip(rounded, longest), batch=batch)
    return problem.with_(batch=batch, seqlen_q=longest[0], seqlen_k=longest[1], varlen=lengths)


def _rows_of_keys(problem: AttentionProblem) -> int:
    """Of packed sequences, all keys together; how many there are in pages the device alone knows, so that it is half of
    what there is room for."""
    return problem.batch * problem.seqlen_k // 2 + 1 if problem.page else problem.head_rows[1]


def _spread(problem: AttentionProblem, *sides: tuple[int, int], batch: int = 0) -> str:
    """Lengths for the field `varlen` of `batch` sequences, those of the problem unless given. `sides`: (rows together,
    longest) of queries and of keys."""
    texts, batch = list[str](), batch or problem.batch
    (rows, most), (_, most_keys) = sides
    if problem.page and most > 1 and rows < batch * most and batch <= MOST_LISTED:
        return _step_of_engine(batch, rows, most, most_keys)
    for rows, longest in sides:
        if batch == 1 or rows == batch * longest:
            texts.append(f"sum:{rows}")
        elif problem.page and problem.seqlen_q == 1:
            texts.append(f"log:{max(1, longest // IN_PAGES)}:{longest}")
        else:
            low = max(1, rows // batch - SPREAD)
            texts.append(f"{low}:{max(low, min(longest, rows // batch + SPREAD))}")
    return "/".join(texts)


def _step_of_engine(batch: int, rows: int, most: int, most_keys: int) -> str:
    """As `_spread`, of a step in which prompts lie beside single tokens: one prompt of `most` rows, as few others of
    half as many as make up the rows, and one row of each other sequence."""
    first = max(1, min(most, rows - batch + 1))
    left = max(0, rows - batch + 1 - first)
    others = min(batch - 1, math.ceil(left / (most / 2)))
    singles = batch - 1 - others
    each, rest = divmod(left, max(1, others))
    queries = [1] * singles + [1 + each + (i < rest) for i in range(others)] + [first]
    least, longest = max(1, most_keys // OF_STEPS), max(1, 3 * most_keys // 4)
    ratio = (longest / least) ** (1 / max(1, singles - 1))
    keys = [round(longest / ratio**i) for i in reversed(range(singles))]
    keys += [min(most_keys, 2 * count) for count in queries[singles:]]
    if not singles:
        keys[-1] = most_keys
    return "/".join("+".join(map(str, side)) for side in (queries, keys))
