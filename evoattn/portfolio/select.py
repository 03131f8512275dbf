"""Which kernels come with evoattn: of each kind of problems those that cover what was measured, and some for all of
plain attention, of which the best by the cost model is near the best of all on problems as people have them.

And what their picks lose on problems that they were not built from: the pick, the best kernels of a search that starts
from it and from the families' known-good configs, and every peer are timed in turns. Regret is the pick's time over the
best of ours."""

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evoattn.engine.breeding import Breeder
from evoattn.engine.group_search import GroupSearch
from evoattn.engine.groups import Group, Kernel
from evoattn.engine.tools import Tools
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.fleet.base import LocalFleet
from evoattn.model.errors import WrongUse
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem, ProblemError
from evoattn.model.records import Timing
from evoattn.model.space import ConfigError, KernelConfig, Value
from evoattn.peers.labels import FLASH_ATTENTION
from evoattn.portfolio import campaign
from evoattn.portfolio.campaign import bits_of, families_of, group_of
from evoattn.portfolio.kernels import Genes, KernelList, kind_of
from evoattn.portfolio.pick import Pick, likely, pick, portfolio_kernels, whole
from evoattn.portfolio.proposals import ClimbingBreeder
from evoattn.portfolio.wins import Raced
from evoattn.portfolio.workload import DRAWS, PLAIN
from evoattn.timing.protocol import COMPARISON

SEEDS, EACH = range(50, 68), 20
"""Seeds of the problems that the general kernels are chosen for, below 100 as all that is built from, and problems of
each."""
IN_FP32 = 3
"""Every third of them counts in fp32 too: one in twenty is drawn so."""
MOST_GENERAL = {"16": 80, "32": 60}
"""By bits. On 697 drawn problems of all kinds the best of 80 scores 1.9 % behind the best of 5,759 before climbs, of 40
3.9 %, of 120 1.0 %."""
MOST_OF_A_KIND = 12
LEAST_SAVED = 0.01
"""Sum of logarithms over the problems of a kind: what a kernel must save beside those before it."""
MOST_LOST = 1.0
"""Natural logarithm: no problem counts for more."""


@dataclass
class Kind:
    """The problems of a kind that were measured, and what each kernel loses on them."""

    problems: int = 0
    lost: dict[str, dict[int, float]] = field(default_factory=dict)
    """By kernel and problem: logarithm of its time over the best."""

    def covering(self, most: int = MOST_OF_A_KIND) -> list[str]:
        """At most so many kernels that lose little together."""
        names = list(self.lost)
        lost = [[self.lost[name].get(i, MOST_LOST) for name in names] for i in range(self.problems)]
        return [names[place] for place in campaign.covering(np.array(lost), most, MOST_LOST, LEAST_SAVED)]


def measured_kinds(groups: Iterable[Group]) -> tuple[dict[str, Kind], dict[str, KernelConfig]]:
    """The kinds of problems of measured groups, and their right kernels by name."""
    kinds: dict[str, Kind] = {}
    configs: dict[str, KernelConfig] = {}
    for group in groups:
        for index, problem in enumerate(group.problems):
            best, kind = group.best(index), kinds.setdefault(kind_of(problem), Kind())
            for kernel in group.kernels.values():
                if kernel.state == "right" and index in kernel.times and index not in kernel.rough:
                    config = whole(kernel.config)
                    configs[config.id] = config
                    known, lost = kind.lost.setdefault(config.id, {}), math.log(kernel.times[index] / best)
                    known[kind.problems] = min(lost, known.get(kind.problems, lost))
            kind.problems += 1
    return kinds, configs


def problems_to_serve() -> list[AttentionProblem]:
    """Of plain attention, drawn as people have them (`portfolio/workload.py`)."""
    found = [p for seed in SEEDS for p in DRAWS[PLAIN](seed, EACH)]
    for problem in found[::IN_FP32]:
        try:
            found.append(problem.with_(dtype="fp32"))
        except ProblemError:  # larger than there is room for
            continue
    return [likely(problem) for problem in found]


def _log_costs(problem: AttentionProblem, configs: Sequence[KernelConfig], gpu: GpuSpec) -> NDArray[np.float64]:
    """[configs]: logarithms of their scores, infinite where a config cannot serve the problem."""
    from evoattn.cost.cost import scores

    able = [i for i, c in enumerate(configs) if not registry.lookup(c.family).why_impossible(problem, c, gpu)]
    found = np.full(len(configs), np.inf)
    found[able] = np.log(scores(problem, [configs[i] for i in able], gpu))
    return found


def general(
    configs: Sequence[KernelConfig], problems: Sequence[AttentionProblem], gpu: GpuSpec, jobs: int | None = None
) -> list[str]:
    """Names of at most MOST_GENERAL configs by bits, chosen one by one, each the one that saves most beside those
    before it: the mean logarithm of the best one's score over the best of all. `jobs` processes work on it, all cores
    unless given, some 0.2 ms a config and problem."""
    chosen: dict[str, None] = {}
    if not configs:
        return []
    with ProcessPoolExecutor(jobs or os.cpu_count()) as workers:
        costs = np.array(list(workers.map(partial(_log_costs, configs=configs, gpu=gpu), problems, chunksize=8)))
    for bits, count in MOST_GENERAL.items():
        rows = [i for i, p in enumerate(problems) if bits_of(p) == bits and np.isfinite(costs[i]).any()]
        lost = costs[rows] - costs[rows].min(axis=1, keepdims=True)
        chosen |= dict.fromkeys(configs[place].id for place in campaign.covering(lost, count, MOST_LOST))
    return list(chosen)


def genes_of(configs: Iterable[KernelConfig]) -> dict[str, Genes]:
    """By family: the values that each parameter has in one of the configs."""
    genes: dict[str, dict[str, set[Value]]] = {}
    for config in configs:
        for name, value in config.params.items():
            genes.setdefault(config.family, {}).setdefault(name, set()).add(value)
    return {family: {name: _in_order(values) for name, values in found.items()} for family, found in genes.items()}


def _in_order(values: Iterable[Value]) -> list[Value]:
    return sorted(values, key=lambda value: (str(type(value)), value))


def select(
    files: Sequence[Path], gpu: GpuSpec, today: KernelList | None, jobs: int | None = None, kinds: Collection[str] = ()
) -> KernelList:
    """The list of these campaigns and of `today`: kinds that they measured, or those of them that are named, have the
    kernels that cover them, others keep theirs. Raises `OSError` or `ValueError` on a file that cannot be read, and
    `WrongUse` for a kind that neither has."""
    groups = (group for file in files for group in campaign.load(file)[1])
    return select_of(groups, gpu, today, jobs, kinds=kinds)


def select_of(
    groups: Iterable[Group],
    gpu: GpuSpec,
    today: KernelList | None,
    jobs: int | None = None,
    beside: bool = False,
    kinds: Collection[str] = (),
    most: int = MOST_OF_A_KIND,
) -> KernelList:
    """As `select`, of measured groups; where kinds are named, the general kernels stay, too. `beside`: kinds that they
    measured keep the kernels of `today`, too. `most`: kernels of a kind. Raises `WrongUse` for a kind that neither
    has."""
    measured, configs = measured_kinds(groups)
    if unknown := sorted(set(kinds) - measured.keys() - (today.kinds.keys() if today else set())):
        raise WrongUse(f"The files have no times of kind {unknown[0]!r}. There are: {', '.join(sorted(measured))}.")
    own = {kind: found.covering(most) for kind, found in measured.items() if not kinds or kind in kinds}
    if today:
        configs |= {config.id: config for config in today.kernels}
        theirs = {kind: [today.kernels[i].id for i in places] for kind, places in today.kinds.items()}
        if beside:
            own = {kind: list(dict.fromkeys([*names, *theirs.get(kind, ())])) for kind, names in own.items()}
        own = theirs | own
    fast = list(dict.fromkeys(name for names in own.values() for name in names))
    if kinds and today:
        everywhere = [today.kernels[i].id for i in today.general]
    else:
        everywhere = general([configs[name] for name in fast], problems_to_serve(), gpu, jobs)
    places = {name: i for i, name in enumerate(dict.fromkeys([*fast, *everywhere]))}
    kernels = tuple(configs[name] for name in places)
    genes = genes_of(kernels)
    for family, known in (today.genes if today else {}).items():
        mine = genes.setdefault(family, {})
        genes[family] = {n: _in_order({*known.get(n, ()), *mine.get(n, ())}) for n in {**known, **mine}}
    return KernelList(
        gpu.arch,
        today.cards if today else (gpu.name,),
        today.skipped if today else (),
        today.regret if today else {},
        genes,
        kernels,
        tuple(places[name] for name in everywhere),
        {kind: tuple(places[name] for name in names) for kind, names in own.items() if names},
    )


FINALISTS = 5
"""Kernels of each search that are timed in turns with the pick."""
NEXT, STARTING = 8, 4
"""What comes after a problem's pick, and known-good configs of each family, that its group's search begins at."""
Place = tuple[Group, int]
"""A group, and a problem's index in it."""


@dataclass(frozen=True)
class Checked:
    """One problem. Times are medians in µs, all taken in turns; `wrong` says why the pick has none, or that of a probe
    alone, as it was far behind."""

    problem: str
    group: str
    pick: tuple[str, dict[str, Any]] | None
    wrong: str
    pick_us: float | None
    best_us: float | None
    winner: tuple[str, dict[str, Any]] | None
    candidates: int
    """Kernels that the search timed on the problem."""
    peers: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    fault: str = ""
    """Which kernels of the search proved wrong, and so have no time."""
    times: dict[str, float] = field(default_factory=dict)
    """µs of each of our kernels in the final, by its id."""
    raced_us: float | None = None
    """In the final, of who won a race of the pick and its rivals before it; None where there was none to race."""

    @property
    def regret(self) -> float:
        """The pick's time over the best of the pick and the search; NaN without a pick."""
        return self.pick_us / self.best_us if self.pick_us and self.best_us else math.nan

    def ahead_of(self, peers: dict[str, float]) -> bool:
        """Whether the pick takes less time than every one of the peers."""
        return self.pick_us is not None and all(self.pick_us < us for us in peers.values())

    @property
    def sdpa(self) -> dict[str, float]:
        """The peers that are SDPA backends."""
        return {name: us for name, us in self.peers.items() if name not in FLASH_ATTENTION}

    def line(self) -> str:
        """For people."""
        name, us = min(self.peers.items(), key=lambda peer: peer[1], default=("none", math.nan))
        ours, best = self.pick_us or math.nan, self.best_us or math.nan
        searched = f"best of {self.candidates:4} {best:9.2f}"
        peer = f"{name:>9} {us:9.2f}, ours / peer {ours / us:.2f}"
        return f"{self.regret:6.3f} {ours:9.2f} µs, {searched}, {peer} | {self.problem} {self.wrong[:60]}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self) | {"regret": self.regret}


def make_groups(
    problems: Sequence[AttentionProblem], picks: Sequence[Pick | None], gpu: GpuSpec
) -> tuple[list[Group], list[Place]]:
    """Searches of these problems, those together that one compiled kernel can serve, and where each problem is. A
    search begins at the picks, at what comes next, and at known-good configs of the families that may win a problem."""
    rows: dict[str, list[int]] = {}
    for i, problem in enumerate(problems):
        rows.setdefault(f"{group_of(problem)} {problem.dtype} {problem.mask}", []).append(i)
    groups, places = [], dict[int, Place]()
    for name, mine in rows.items():
        own = list(dict.fromkeys(problems[i] for i in mine))
        group = Group(name, own, families_of(own, gpu), len(own))
        group.given = _beginnings(own, [picks[i] for i in mine], group.families, gpu)
        places |= {i: (group, own.index(problems[i])) for i in mine}
        groups.append(group)
    return groups, [places[i] for i in range(len(problems))]


def _beginnings(
    problems: Sequence[AttentionProblem], picks: Iterable[Pick | None], families: Iterable[str], gpu: GpuSpec
) -> list[tuple[str, dict[str, Any]]]:
    """Where a group's search begins: configs that are valid for one of its problems."""
    found = [one.config for one in picks if one]
    found += [config for problem in problems for config in portfolio_kernels(problem, gpu)[:NEXT]]
    for name in families:
        family, known = registry.lookup(name), load_space(name, gpu).starting_configs()
        valid = [c for c in known if any(not family.why_invalid(p, c, gpu) for p in problems)]
        found += valid[:STARTING]
    return [(config.family, config.params) for config in {config.id: config for config in found}.values()]


def check(
    engine: GroupSearch,
    place: Place,
    chosen: Pick | None,
    rounds: int,
    peers: tuple[str, ...],
    known: Sequence[Kernel] = (),
    rivals: Sequence[Kernel] = (),
) -> Checked:
    """The pick, the search's best, the `known` kernels, the pick's `rivals` and the peers in turns, all proved on the
    problem's own shape; before that a race of the pick and its rivals, whose times count for nothing else."""
    group, index = place
    problem = group.problems[index]
    ours = _of_group(group, Kernel(chosen.family, chosen.config.params)) if chosen else None
    found = [k for k in group.leaders(index, FINALISTS + 1) if ours is None or k.id != ours.id][:FINALISTS]
    others = [_of_group(group, kernel) for kernel in (*known, *rivals)]
    raced = _winner(engine, place, [ours, *others[len(known) :]]) if ours and rivals else None
    distinct = {k.id: k for k in ([ours] if ours else []) + found + others}
    result = engine.final(group, index, list(distinct.values()), replace(COMPARISON, samples=rounds), peers)
    times, timings = result.right_us, result.timings
    faults = {id: timing.disqualified for id, timing in timings.items() if timing.disqualified}
    mine = timings.get(ours.id, Timing((), {})) if ours else Timing((), {"out": "no pick"})
    wrong = "" if ours and ours.id in times else mine.disqualified or mine.protocol.get("out", "It has no time.")
    right = [k for k in distinct.values() if k.id in times]
    for kernel in right:
        kernel.state = "right"
    winner = min(right, key=lambda k: times[k.id], default=None)
    best = times[winner.id] if winner else None
    theirs = {name: times[name] for name in peers if name in times}
    fault = "; ".join(f"{distinct[id].family} {id}: {why}" for id, why in faults.items() if not ours or id != ours.id)
    return Checked(
        problem.describe(),
        group_of(problem),
        (ours.family, ours.params) if ours else None,
        wrong,
        mine.median_us if mine.samples_us and not mine.disqualified else None,
        best,
        (winner.family, winner.params) if winner else None,
        sum(index in kernel.times for kernel in group.kernels.values()),
        theirs,
        result.refusals,
        fault,
        {k.id: times[k.id] for k in right},
        times.get(raced.id) if raced else None,
    )


def _rivals(chosen: Pick | None, problem: AttentionProblem, gpu: GpuSpec) -> list[Kernel]:
    """Those of a pick that can serve the very problem."""
    rivals = chosen.rivals if chosen else ()
    able = (c for c in rivals if not registry.lookup(c.family).why_impossible(problem, c, gpu))
    return [Kernel(config.family, config.params) for config in able]


def _winner(engine: GroupSearch, place: Place, kernels: Sequence[Kernel]) -> Kernel:
    """Of a race of the first of these kernels with the others, decided as the op decides it."""
    us = engine.final(*place, kernels).right_us
    return kernels[Raced(tuple(us.get(kernel.id, math.inf) for kernel in kernels)).best]


def _of_group(group: Group, kernel: Kernel) -> Kernel:
    """The group's kernel of this config, which the kernel becomes where there is none."""
    return group.kernels.setdefault(kernel.id, kernel)


def final_tables(judged: Iterable[tuple[Place, Checked]]) -> dict[str, Any]:
    """What finals measured, by group, as `campaign.save` takes it."""
    tables: dict[str, Any] = {}
    for (group, index), row in judged:
        table = tables.setdefault(group.name, {"kernels": [], "us": [[] for _ in group.problems]})
        table["kernels"] += [name for name in row.times if name not in table["kernels"]]
        table["us"][index] = [row.times.get(name) for name in table["kernels"]]
    for table in tables.values():
        count = len(table["kernels"])
        table["us"] = [us + [None] * (count - len(us)) for us in table["us"]]
    return tables


def summary(rows: list[Checked]) -> str:
    """Regret, who is ahead of whom, and the ten problems that lost most."""
    regrets = [r.regret for r in rows if not math.isnan(r.regret)]
    geomean = math.exp(fmean(map(math.log, regrets)))
    worst = sorted((r for r in rows if not math.isnan(r.regret)), key=lambda r: -r.regret)[:10]
    percentile = quantiles(regrets, n=20)[-1] if len(regrets) > 1 else regrets[0]
    with_sdpa, with_any = [r for r in rows if r.sdpa], [r for r in rows if r.peers]
    return "\n".join(
        [
            f"{len(rows)} problems, {len(regrets)} picks, {sum(bool(r.wrong) for r in rows)} wrong or missing",
            f"regret: geomean {geomean:.4f}, 95th percentile {percentile:.3f}, worst {max(regrets):.3f}",
            f"ahead of every SDPA backend on {sum(r.ahead_of(r.sdpa) for r in with_sdpa)} of {len(with_sdpa)}, "
            f"of every peer on {sum(r.ahead_of(r.peers) for r in with_any)} of {len(with_any)}",
            "most lost:",
            *(f"  {r.regret:.3f} {r.problem}: {r.pick and r.pick[0]} → {r.winner and r.winner[0]}" for r in worst),
        ]
    )


def known_kernels(rows: Sequence[tuple[str, dict[str, Any]]], problem: AttentionProblem, gpu: GpuSpec) -> list[Kernel]:
    """Of the rows, (family, parameters), those that today's families and spaces have for the problem."""
    found = []
    for family, params in rows:
        try:
            config = load_space(family, gpu).make_config(params)
        except ConfigError:
            continue
        if not registry.lookup(family).why_invalid(problem, config, gpu):
            found.append(Kernel(family, config.params))
    return found


@dataclass(frozen=True)
class Judging:
    """How problems are checked."""

    seconds: float = 10.0
    """Of search for each problem; all are searched at once in one set of processes, and what is compiled for one is
    timed on others that it serves."""
    peers: tuple[str, ...] = ()
    rounds: int = 7
    """Of the final."""
    jobs: int | None = None
    """Compile processes."""
    known: Callable[[AttentionProblem], Sequence[tuple[str, dict[str, Any]]]] | None = None
    """Kernels that take part in a problem's final, (family, parameters)."""
    breeder: type[Breeder] = ClimbingBreeder
    """Of the search."""
    races: bool = False
    """Whether a pick races its rivals before the final, as in the op's first call of a size."""


def check_all(
    problems: Sequence[AttentionProblem],
    gpu: GpuSpec,
    wanted: Judging,
    say: Callable[[str], None],
    tools: Tools | None = None,
) -> Iterator[tuple[Place, Checked]]:
    """Search all, then check one by one. `tools`: what the processes run, where it is not the usual."""
    picks = [pick(problem, gpu) for problem in problems]
    groups, places = make_groups(problems, picks, gpu)
    fleet = LocalFleet(wanted.jobs) if wanted.jobs else None
    known = [known_kernels(wanted.known(p), p, gpu) if wanted.known else [] for p in problems]
    with GroupSearch(groups, gpu, wanted.breeder, fleet, tools) as engine:
        if wanted.seconds:
            engine.run(wanted.seconds * len(problems))
            say(f"searched: {engine.compiled} compiles, {engine.measured} times")
        chosen = [[Kernel(one.family, one.config.params)] if one else [] for one in picks]
        rivals = [_rivals(*both, gpu) if wanted.races else [] for both in zip(picks, problems, strict=True)]
        named = zip(places, chosen, known, rivals, strict=True)
        engine.compile_all([(group, k) for (group, _), own, more, others in named for k in own + more + others])
        for place, one, more, others in zip(places, picks, known, rivals, strict=True):
            yield place, check(engine, place, one, wanted.rounds, wanted.peers, more, others)
