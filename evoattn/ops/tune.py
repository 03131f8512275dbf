"""`evoattn.tune(shapes, budget="5m")`: a search for what a model asks of attention; the op takes the winners from then
on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol as Structure

from evoattn.engine.budget import parse_budget
from evoattn.engine.groups import Group, Kernel
from evoattn.evaluation.server import require_startable, without_main_file
from evoattn.families import registry
from evoattn.model.errors import FailedRun, WrongUse
from evoattn.model.gpu import GpuSpec, detect_devices
from evoattn.model.problem import AttentionProblem
from evoattn.ops.call import strided
from evoattn.ops.choice import Choice, Refusal
from evoattn.ops.runtime import current
from evoattn.ops.shapes import Asked, Shapes, Wanted, problems_of
from evoattn.peers.labels import SDPA
from evoattn.portfolio.pick import Pick, portfolio_kernels
from evoattn.portfolio.wins import CLEARLY, Win
from evoattn.timing.protocol import COMPARISON, FinalResult, Protocol

FINALISTS = 3
FINAL_SHARE, MOST_FINAL_SHARE = 0.2, 0.5
"""Of the budget, the least and the most that is left for comparing the best with what runs today."""
FINAL_SECONDS, FIRST_SECONDS = 1.5, 4.0
"""A comparison takes 0.6 to 1.7 s on an H200, of which cuDNN's first call of a shape takes 0.4 to 1.2 s. What the first
one takes beside: it loads PyTorch's own kernels."""
UNKNOWN_GAIN, LEAST_GAIN = 0.3, 0.01
"""Part of a call's time that a search may save: where nothing that was measured for it runs today, and where a search
has been."""


class Searches(Structure):
    """What `tune` asks of `evoattn.engine.group_search.GroupSearch`."""

    compiled: int
    measured: int

    def __enter__(self) -> Searches: ...
    def __exit__(self, *error: object) -> None: ...
    def run(self, seconds: float, refresh: Callable[[], None] = ...) -> None: ...
    def final(
        self, group: Group, index: int, kernels: list[Kernel], protocol: Protocol, peers: tuple[str, ...]
    ) -> FinalResult: ...


@dataclass(frozen=True)
class TuneProgress:
    """Where a run of `tune` is: seconds since its start, kernels that were compiled and times that were taken."""

    stage: str
    seconds: float
    compiled: int
    measured: int


Refresh = Callable[[TuneProgress], None]


@dataclass(frozen=True)
class Tuned:
    """One problem, before and after. Times are µs per call, of one interleaved run; None where nothing was timed."""

    problem: AttentionProblem
    calls: int
    before: str
    before_us: float | None
    after: str
    after_us: float | None

    @property
    def gain(self) -> float:
        """Time before over time after; 1 where nothing changed."""
        return self.before_us / self.after_us if self.before_us and self.after_us else 1.0


@dataclass(frozen=True)
class TuneResult:
    """All problems, those that take the most time first."""

    rows: tuple[Tuned, ...]

    @property
    def speedup(self) -> float:
        """Of all attention that was asked for, by calls and times."""
        timed = [row for row in self.rows if row.before_us and row.after_us]
        after = sum(row.calls * (row.after_us or 0) for row in timed)
        return sum(row.calls * (row.before_us or 0) for row in timed) / after if after else 1.0

    def __str__(self) -> str:
        lines = [f"{'calls':>7} {'before, µs':>11} {'after, µs':>10} {'gain':>6}  problem"]
        for row in self.rows:
            before, after = (f"{us:.2f}" if us else "?" for us in (row.before_us, row.after_us))
            lines.append(
                f"{row.calls:7d} {before:>11} {after:>10} {row.gain:5.2f}×  {row.problem.describe()}"
                f" ({row.before}{'' if row.after == row.before else f' → {row.after}'})"
            )
        gain = f"{self.speedup:.2f} times as fast as before" if self.speedup >= 1.005 else "nothing faster was found"
        return "\n".join([*lines, f"All attention: {gain}."])


def _compare(
    engine: Searches, group: Group, index: int, entry: Asked, today: Choice | Refusal, gpu: GpuSpec
) -> tuple[Tuned, Win | None]:
    """What runs today, after a race its winner, the best that was found and SDPA, in turns and proved as a study's
    finalists are; the winner if it is right and clearly ahead."""
    problem = group.problems[index]
    ours = Kernel(today.family.name, dict(today.config.params)) if isinstance(today, Choice) else None
    found = [k for k in group.leaders(index, FINALISTS + 1) if ours is None or k.id != ours.id][:FINALISTS]
    result = engine.final(group, index, [*([ours] if ours else []), *found], COMPARISON, SDPA)
    times = result.right_us
    peers = {name: times[name] for name in SDPA if name in times}
    best_peer = min(peers, key=lambda name: peers[name]) if peers else None
    before, before_us = f"SDPA {best_peer or ''}".rstrip(), peers[best_peer] if best_peer else None
    if ours:
        timing = result.timings.get(ours.id)
        timed = timing is not None and timing.samples_us and not timing.disqualified  # be it far behind
        before, before_us = _name(ours), timing.median_us if timing and timed else None
    limit = min([us for us in (before_us, *peers.values()) if us is not None], default=float("inf"))
    best = min((k for k in found if k.id in times), key=lambda k: times[k.id], default=None)
    if best is None or times[best.id] > CLEARLY * limit:
        return Tuned(problem, entry.count, before, before_us, before, before_us), None
    us = times[best.id]
    win = Win(gpu.name, gpu.sm_count, problem, best.family, best.params, us, before_us)
    return Tuned(problem, entry.count, before, before_us, _name(best), us), win


def _gain(today: Pick | None) -> float:
    """Part of a call's time that a search should save: what a portfolio's pick loses to the best known."""
    if today is None or today.estimated:
        return UNKNOWN_GAIN
    regret = today.expected_regret if isinstance(today, Pick) else None
    return max(LEAST_GAIN, 1 - 1 / regret) if regret else LEAST_GAIN


def groups_of(entries: list[Asked], gpu: GpuSpec) -> list[Group]:
    """The problems by what one kernel serves, each group due its share of calls × time × expected gain."""
    groups: dict[str, Group] = {}
    for entry in entries:
        p = entry.problem
        able = registry.contenders(p, gpu)
        if not able:
            continue
        dims = f"d{p.head_dim}/{p.value_dim}" if p.value_dim else f"d{p.head_dim}"
        name = " ".join((p.dtype, dims, p.mask, *_of_pass(p), *p.compiled_variants))  # what one kernel serves
        group = groups.setdefault(name, Group(name, [], able, 0.0))
        group.problems.append(p)
        group.families = tuple(dict.fromkeys((*group.families, *able)))
        given = [(c.family, c.params) for c in portfolio_kernels(p, gpu)]
        picked = current.best_known(p, gpu)
        if picked:
            given.insert(0, (picked.family, picked.config.params))
        group.weight += entry.count * (entry.us or 1.0) * _gain(picked)
        group.given += [one for one in given if one not in group.given]
    total = sum(group.weight for group in groups.values())
    for group in groups.values():
        group.weight = max(group.weight / total, 0.02)
    return list(groups.values())


def _of_pass(problem: AttentionProblem) -> list[str]:
    """Which pass of attention it is, and what else of it a kernel's code depends on."""
    said = {"backward": problem.op == "backward", "lse": problem.lse, problem.grads: problem.grads}
    return [word for word, holds in (said | {"deterministic": problem.deterministic}).items() if holds]


def _untouched(entry: Asked) -> Tuned:
    """The row of a problem that was not searched."""
    why = "SDPA: no family serves it"
    return Tuned(entry.problem, entry.count, why, None, why, None)


@contextmanager
def _kept() -> Iterator[list[Win]]:
    """A list of winners, which the op takes once the context ends, however it does."""
    wins: list[Win] = []
    try:
        yield wins
    finally:
        if wins:
            current.wins().add(wins)
            current.forget()


def _engine(groups: list[Group], gpu: GpuSpec) -> Searches:
    from evoattn.engine.group_search import GroupSearch  # and with it what renders and compiles

    return GroupSearch(groups, gpu)


def _name(kernel: Kernel) -> str:
    return f"{kernel.family} {kernel.id[:8]}"


def tune(
    shapes: Shapes | Wanted,
    budget: str = "5m",
    *,
    refresh: Refresh = lambda progress: None,
    gpu: GpuSpec | None = None,
    make_engine: Callable[[list[Group], GpuSpec], Searches] | None = None,
) -> TuneResult:
    """Search kernels for these problems on the first CUDA device, together, and keep the winners for
    `evoattn.attention`.

    `shapes` are what `evoattn.capture` recorded, or problems, names and shapes, or one of these. The time goes to where
    calls × time × expected gain is greatest; problems that one kernel can serve are searched as one. A fifth of the
    budget, or up to a half where problems are many, is for comparisons, the problems that take the most time first;
    what they do not reach stays as it is. A winner was right on the device and clearly ahead of what runs today and of
    SDPA in one interleaved run, as far as these can be timed (SDPA refuses sinks and soft caps). It is kept in the
    user's data folder (`kept/wins.jsonl`), and taken from then on. What `capture` recorded of training has both
    passes, the forward one with a log-sum-exp, and both are searched. An interrupt keeps the winners of the problems
    that were compared. Raises `WrongUse` for a wrong budget or shape, `FailedRun` without a known GPU and where no
    worker process can start."""
    require_startable()
    seconds = parse_budget(budget).seconds
    if seconds is None:
        raise WrongUse(f"tune takes a time such as 90s or 5m, not {budget!r}.")
    given = shapes.entries if isinstance(shapes, Shapes) else [Asked(problem, 1) for problem in problems_of(shapes)]
    called = Shapes()  # as calls ask for them: a win is found for no other text
    for one in given:
        called.add(one.problem.canonical(), one.count, one.us)
    if gpu is None:
        devices = detect_devices()
        gpu = devices[0].spec if devices else None
    if gpu is None:
        raise FailedRun(
            "There is no CUDA device here that evoattn knows (see `evoattn gpus`); tune times kernels on one."
        )
    entries = called.entries
    groups = groups_of(entries, gpu)
    tuned: dict[int, Tuned] = {}
    if groups:
        started = time.monotonic()
        with without_main_file(), _kept() as wins, (make_engine or _engine)(groups, gpu) as engine:

            def say(stage: str) -> None:
                refresh(TuneProgress(stage, time.monotonic() - started, engine.compiled, engine.measured))

            say("starting workers")
            places = {id(p): (group, i) for group in groups for i, p in enumerate(group.problems)}
            finals = min(
                max(FINAL_SHARE * seconds, FIRST_SECONDS + FINAL_SECONDS * len(places)), MOST_FINAL_SHARE * seconds
            )
            engine.run(seconds - finals, lambda: say("searching"))
            deadline = time.monotonic() + finals
            for entry in entries:
                if place := places.get(id(entry.problem)):
                    if tuned and time.monotonic() > deadline:
                        late = "not compared: the time was over"
                        tuned[id(entry)] = Tuned(entry.problem, entry.count, late, None, late, None)
                        continue
                    say("comparing")
                    today = current.runtime().choose(strided(entry.problem), gpu)
                    tuned[id(entry)], win = _compare(engine, *place, entry, today, gpu)
                    wins += [win] if win else []
    return TuneResult(tuple(tuned.get(id(entry)) or _untouched(entry) for entry in entries))
