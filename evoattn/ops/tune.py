"""`evoattn.tune(shapes, budget="5m")`: a search for what a model asks of attention; the op takes the winners from then
on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from evoattn.evaluation.main_file import require_startable, without_main_file
from evoattn.model.errors import FailedRun, WrongUse
from evoattn.model.gpu import GpuSpec, detect_devices
from evoattn.model.problem import AttentionProblem
from evoattn.ops import current
from evoattn.ops.choice import Picked
from evoattn.ops.shapes import Asked, Shapes, Wanted, problems_of
from evoattn.ops.tune_groups import groups_of
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.wins import Win
from evoattn.search.budget import parse_budget

PEERS = ("flash", "cudnn", "efficient", "math")
"""What SDPA could run: the backends of torch."""
FINALISTS = 3
FINAL_SHARE = 0.2
"""Of the budget, left for comparing the best with what runs today."""
CLEARLY = 0.985
"""A kernel replaces what runs today if it takes at most this part of its time in one interleaved run."""


class Searches(Protocol):
    """What `tune` asks of `evoattn.portfolio.engine.engine.Engine`."""

    compiled: int
    measured: int

    def __enter__(self) -> Searches: ...
    def __exit__(self, *error: object) -> None: ...
    def run(self, seconds: float, refresh: Callable[[], None] = ...) -> None: ...
    def prove(self, group: Group, index: int, kernel: Kernel) -> str: ...
    def final(
        self, group: Group, index: int, kernels: list[Kernel], rounds: int = ..., peers: tuple[str, ...] = ...
    ) -> tuple[list[float | None], dict[str, float], dict[str, str]]: ...


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
        return "\n".join([*lines, f"All attention: {self.speedup:.2f}×."])


def _compare(
    engine: Searches, group: Group, index: int, entry: Asked, today: Picked | None, gpu: GpuSpec
) -> tuple[Tuned, Win | None]:
    """What runs today, the best that was found and SDPA, in turns; the winner if it is clearly ahead and right."""
    problem = group.problems[index]
    ours = Kernel(today.family, dict(today.config.params)) if today and not today.estimated else None
    found = [k for k in group.leaders(index, FINALISTS + 1) if ours is None or k.id != ours.id][:FINALISTS]
    contestants = [*([ours] if ours else []), *found]
    times, peers, _ = engine.final(group, index, contestants, peers=PEERS)
    best_peer = min(peers, key=lambda name: peers[name]) if peers else None
    before, before_us = f"SDPA {best_peer or ''}".rstrip(), peers[best_peer] if best_peer else None
    if ours:
        before, before_us = _name(ours), times[0]
    limit = min([us for us in (before_us, *peers.values()) if us is not None], default=float("inf"))
    ranked = sorted((us, i) for i, us in enumerate(times) if us is not None and contestants[i] is not ours)
    for us, i in ranked:
        if us <= CLEARLY * limit and not engine.prove(group, index, contestants[i]):
            kernel = contestants[i]
            win = Win(gpu.name, gpu.sm_count, problem, kernel.family, kernel.params, us, before_us)
            return Tuned(problem, entry.count, before, before_us, _name(kernel), us), win
    return Tuned(problem, entry.count, before, before_us, before, before_us), None


def _untouched(entry: Asked) -> Tuned:
    """The row of a problem that was not searched."""
    why = "not searched: it asks for a log-sum-exp" if entry.problem.lse else "SDPA: no family serves it"
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
            current.runtime().forget()


def _engine(groups: list[Group], gpu: GpuSpec) -> Searches:
    from evoattn.portfolio.engine.engine import Engine  # and with it what renders and compiles

    return Engine(groups, gpu)


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
    budget is for comparisons, the problems that take the most time first; what they do not reach stays as it is. A
    winner was right on the device and clearly ahead of what runs today and of SDPA in one interleaved run, as far as
    these can be timed (SDPA refuses sinks and soft caps). It is kept in the user's data folder (`wins.json`): this
    process and later ones take it. Problems that ask for a log-sum-exp are not searched. An interrupt keeps the winners
    of the problems that were compared. Raises `WrongUse` for a wrong budget or shape, `FailedRun` without a known GPU
    and where no worker process can start.
    """
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
            engine.run((1 - FINAL_SHARE) * seconds, lambda: say("searching"))
            deadline = time.monotonic() + FINAL_SHARE * seconds
            places = {id(p): (group, i) for group in groups for i, p in enumerate(group.problems)}
            for entry in entries:
                if place := places.get(id(entry.problem)):
                    if tuned and time.monotonic() > deadline:
                        late = "not compared: the time was over"
                        tuned[id(entry)] = Tuned(entry.problem, entry.count, late, None, late, None)
                        continue
                    say("comparing")
                    today = current.best_known(entry.problem, gpu)
                    tuned[id(entry)], win = _compare(engine, *place, entry, today, gpu)
                    wins += [win] if win else []
    return TuneResult(tuple(tuned.get(id(entry)) or _untouched(entry) for entry in entries))
