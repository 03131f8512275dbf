"""What picks lose on problems that they were not built from: beside searches from them, and beside peers.

For each problem the pick, the best kernels of a search that starts from it and from the families' known-good configs,
and every peer are timed in turns. Regret is the pick's time over the best of ours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, quantiles
from typing import Any

from evoattn.engine.group_search import GroupSearch, Manner
from evoattn.engine.groups import Group, Kernel
from evoattn.engine.tools import Tools
from evoattn.families import registry
from evoattn.fleet.local import LocalFleet
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import ConfigError, load_space
from evoattn.peers.labels import FLASH_ATTENTION
from evoattn.peers.table import peers_of
from evoattn.portfolio.campaign import families_of, group_of
from evoattn.portfolio.pick import Pick, pick, portfolio_kernels
from evoattn.timing.protocol import COMPARISON

FINALISTS = 5
"""Kernels of each search that are timed in turns with the pick."""
WINNERS = 3
"""Kernels of each problem that `--winners` keeps."""
STARTING = 6
"""Known-good configs of each family that a search begins at, beside the pick and what comes next."""


@dataclass(frozen=True)
class Checked:
    """One problem. Times are medians in µs, all taken in turns; `wrong` says why the pick has none."""

    problem: str
    group: str
    pick: tuple[str, dict[str, Any]] | None
    wrong: str
    pick_us: float | None
    best_us: float | None
    winner: tuple[str, dict[str, Any]] | None
    candidates: int
    peers: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    spreads: dict[str, tuple[float, float]] = field(default_factory=dict)
    """10th and 90th percentile of the rounds, µs, of the winner, called `ours`, and of each peer."""
    fault: str = ""
    """Which kernels of the search proved wrong, and so have no time."""

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


def make_group(index: int, problem: AttentionProblem, chosen: Pick | None, gpu: GpuSpec) -> Group:
    """A search of one problem that starts from the pick and the other kernels of its class, over the families of a
    campaign."""
    group = Group(f"{index} {problem.describe()}", [problem], families_of([problem], gpu))
    first = [(chosen.family, chosen.config.params)] if chosen else []
    group.given = first + [(c.family, c.params) for c in portfolio_kernels(problem, gpu)]
    return group


def check(
    engine: GroupSearch,
    group: Group,
    chosen: Pick | None,
    rounds: int,
    peers: tuple[str, ...],
    known: Sequence[Kernel] = (),
) -> Checked:
    """The pick, the search's best, the `known` kernels and the peers in turns, all proved on the problem's own
    shape."""
    problem = group.problems[0]
    ours = Kernel(chosen.family, chosen.config.params) if chosen else None
    found = [k for k in group.leaders(0, FINALISTS + 1) if ours is None or k.id != ours.id][:FINALISTS]
    distinct = {k.id: k for k in ([ours] if ours else []) + found + list(known)}
    result = engine.final(group, 0, list(distinct.values()), replace(COMPARISON, samples=rounds), peers)
    times, timings = result.right_us, result.timings
    faults = {id: timing.disqualified for id, timing in timings.items() if timing.disqualified}
    wrong = "" if ours and ours.id in times else faults.get(ours.id, "It has no time.") if ours else "no pick"
    winner = min((k for k in distinct.values() if k.id in times), key=lambda k: times[k.id], default=None)
    best = times[winner.id] if winner else None
    theirs = {name: times[name] for name in peers if name in times}
    named = {"ours": timings[winner.id].samples_us} if winner else {}
    named |= {name: timings[name].samples_us for name in theirs}
    fault = "; ".join(f"{distinct[id].family} {id}: {why}" for id, why in faults.items() if not ours or id != ours.id)
    return Checked(
        problem.describe(),
        group_of(problem),
        (ours.family, ours.params) if ours else None,
        wrong,
        times.get(ours.id) if ours else None,
        best,
        (winner.family, winner.params) if winner else None,
        len(group.kernels),
        theirs,
        result.refusals,
        {name: _spread(list(samples)) for name, samples in named.items() if samples},
        fault,
    )


def _spread(samples: list[float]) -> tuple[float, float]:
    """10th and 90th percentile."""
    tenths = quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else samples * 2
    return tenths[0], tenths[-1]


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


def winner_lines(group: Group, row: Checked, gpu: GpuSpec) -> list[str]:
    """The fastest of the final and the next ones of the search, as `read_configs` takes them."""
    problem = group.problems[0]
    best = [row.winner] if row.winner else []
    best += [(kernel.family, kernel.params) for kernel in group.leaders(0, WINNERS)]
    distinct = [kernel for i, kernel in enumerate(best) if kernel not in best[:i]][:WINNERS]
    about = {"problem": problem.to_dict(), "arch": gpu.arch, "median_us": row.best_us}
    return [json.dumps(about | {"family": family, "config": params}) + "\n" for family, params in distinct]


def known_kernels(rows: Sequence[tuple[str, dict[str, Any]]], group: Group, gpu: GpuSpec) -> list[Kernel]:
    """Of the rows, (family, parameters), those that today's families and spaces have for the group's problem."""
    problem, found = group.problems[0], []
    for family, params in rows:
        try:
            config = load_space(family, gpu).make_config(params)
        except ConfigError:
            continue
        if not registry.lookup(family).why_invalid(problem, config, gpu):
            found.append(Kernel(family, config.params))
    return found


def bench_row(group: Group, row: Checked) -> dict[str, Any]:
    """The row as `evoattn bench` writes it; without a time of ours where it proved wrong."""
    problem = group.problems[0]

    def time_of(name: str, us: float) -> dict[str, float]:
        low, high = row.spreads.get(name, (us, us))
        return {"median_us": us, "p10_us": low, "p90_us": high}

    us, (family, config) = (row.best_us or 0.0, row.winner) if row.winner else (0.0, ("", {}))
    return {
        "problem": problem.to_dict(),
        "describe": problem.describe(),
        "ours": time_of("ours", us) if us else None,
        "tflops": problem.flops / us / 1e6 if us else None,
        "family": family,
        "config": config,
        "peers": {name: time_of(name, us) for name, us in row.peers.items()},
        "versions": {name: peers_of(problem)[name].version(problem) for name in row.peers},
        "refusals": row.refusals,
    }


@dataclass(frozen=True)
class Wanted:
    """How problems are checked."""

    seconds: float = 10.0
    """Of search for each problem; all are searched at once in one set of processes."""
    peers: tuple[str, ...] = ()
    rounds: int = 7
    """Of the final."""
    jobs: int | None = None
    """Compile processes."""
    families: tuple[str, ...] = ()
    """That the searches look at; all that serve a problem where none is named."""
    known: Callable[[AttentionProblem], Sequence[tuple[str, dict[str, Any]]]] | None = None
    """Kernels that take part in a problem's final, (family, parameters)."""


def check_all(
    problems: Sequence[AttentionProblem],
    gpu: GpuSpec,
    wanted: Wanted,
    say: Callable[[str], None],
    tools: Tools | None = None,
) -> Iterator[tuple[Group, Checked]]:
    """Search all, then check one by one. `tools`: what the processes run, where it is not the usual."""
    picks = [pick(problem, gpu) for problem in problems]
    groups = [make_group(i, problem, picks[i], gpu) for i, problem in enumerate(problems)]
    for group in groups:
        group.families = wanted.families or group.families
        for name in group.families:
            family, space = registry.lookup(name), load_space(name, gpu)
            valid = [c for c in space.starting_configs() if not family.why_invalid(group.problems[0], c, gpu)]
            group.given += [(name, config.params) for config in valid[:STARTING]]
    fleet = LocalFleet(wanted.jobs) if wanted.jobs else None
    with GroupSearch(groups, gpu, Manner(most=1), fleet, tools) as engine:
        engine.run(wanted.seconds * len(groups))
        say(f"searched: {engine.compiled} compiles, {engine.measured} times")
        for group, chosen in zip(groups, picks, strict=True):
            known = known_kernels(wanted.known(group.problems[0]), group, gpu) if wanted.known else []
            yield group, check(engine, group, chosen, wanted.rounds, wanted.peers, known)
