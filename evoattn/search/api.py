"""`evoattn.search(problem, budget="1m")`: a study from Python, without a terminal."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from evoattn.engine.progress import Progress
from evoattn.engine.tools import Tools
from evoattn.evaluation.server import require_startable, without_main_file
from evoattn.model.errors import FailedRun, WrongUse, in_python
from evoattn.model.paths import database_text
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Trial
from evoattn.model.shape_text import by_name_or_shape
from evoattn.model.space import KernelConfig
from evoattn.search.kept import keep_leader
from evoattn.search.machines import Machines, machines_of
from evoattn.search.request import SearchWords, plan, read_words
from evoattn.search.setup import PreparedSearch, begin_study, make_search
from evoattn.storage.engine import without_password
from evoattn.storage.versions import collect


@dataclass(frozen=True)
class SearchResult:
    """A study that has ended.

    `best` is its leader, to be called by `evoattn.load(result.best.number, db=result.db)`."""

    study: str
    problem: AttentionProblem
    db: str
    best: Trial
    progress: Progress
    kept: str = ""
    """What `evoattn.attention` runs from now on, in one sentence; empty where nothing was asked or compared."""

    def __str__(self) -> str:
        """In some lines: the problem, the leader and what it takes, and where it is kept."""
        best = self.best
        took = f"relative cost {self.value:.4g}; never timed" if best.timing is None else f"{self.value:.2f} µs"
        if self.ratio:
            took += f", {self.ratio:.3f} of the fastest peer's time"
        return (
            f"{self.problem.describe()}\n"
            f"Best kernel: trial {best.number} ({best.family}), {took}\n"
            f"  {KernelConfig(best.family, best.config).describe()}\n"
            f"Kept: study {self.study} in {without_password(self.db)}" + (f"\n{self.kept}" if self.kept else "")
        )

    @property
    def value(self) -> float | None:
        """The leader's median in µs; its relative cost in an offline search."""
        return self.best.value

    @property
    def ratio(self) -> float | None:
        """The leader's median over the fastest peer's; None in an offline search."""
        return self.progress.ratio

    @property
    def peers(self) -> dict[str, float]:
        """Median µs by peer."""
        return dict(self.progress.peers)


@in_python()
def search(
    problem: AttentionProblem | str,
    budget: str = "1m",
    *,
    gpu: str = "auto",
    families: Sequence[str] | str = (),
    sampler: str | None = None,
    study: str | None = None,
    seed: int | None = None,
    db: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    refresh: Callable[[Progress], None] = lambda progress: None,
    devices: str | None = None,
    ray: str | None = None,
    keep: bool = True,
    machines: Machines | None = None,
    tools: Tools | None = None,
) -> SearchResult:
    """Search a kernel for `problem`, an `AttentionProblem`, a name of `evoattn problems`, or a shape.

    The winner is what `evoattn.attention` runs from now on, where the final shows it clearly ahead of what ran and of
    SDPA; `keep=False` leaves that as it is. The other words are those of `evoattn search`; all trials are recorded in
    the database `db`, the usual one unless given. `refresh` is called with the progress several times per second.
    `machines` and `tools` are those that the words name unless given.

    Raises `WrongUse` (a word that cannot be) or `FailedRun` (no config was right, a worker that does not start …)."""
    require_startable()
    wanted = by_name_or_shape(problem) if isinstance(problem, str) else problem
    if not isinstance(wanted, AttentionProblem):
        kind = type(problem).__name__
        raise WrongUse(f"A search is for an AttentionProblem, the name of one or a shape as text, not a {kind}.")
    if gpu is None:
        raise WrongUse('gpu is "auto" or the name of a GPU, not None.')
    words = SearchWords(
        gpu,
        budget,
        families=_names(families),
        sampler=sampler,
        study=study,
        seed=seed,
        db=database_text(db),
        jobs=jobs,
        devices=devices,
        ray=ray,
        keep=keep,
    )
    request = replace(read_words(words), problem=wanted)
    alone = without_main_file() if tools is None else nullcontext()
    with alone, nullcontext(machines) if machines else machines_of(words) as found:
        return _run_study(begin_study(request, plan(words, wanted, found.devices)), found, refresh, tools)


def _names(families: Sequence[str] | str) -> tuple[str, ...]:
    """Raises `WrongUse` for what are no names."""
    names = (families,) if isinstance(families, str) or not isinstance(families, Iterable) else tuple(families)
    if not all(isinstance(name, str) for name in names):
        raise WrongUse(f"families must be names of `evoattn families`, not {families!r}.")
    return names


def _run_study(
    prepared: PreparedSearch,
    machines: Machines,
    refresh: Callable[[Progress], None],
    tools: Tools | None,
) -> SearchResult:
    storage, record = prepared.storage, prepared.study
    try:
        storage.use_environment(collect(prepared.plan.device))
        with storage.lock_study(record):
            running = make_search(prepared, machines, tools)
            progress = running.run(prepared.budget, lambda: refresh(running.progress))
        leaders = storage.leaderboard(record, 1)
        kept = keep_leader(prepared) if prepared.words.keep else ""
    finally:
        storage.close()
    if not leaders:
        raise FailedRun(f"Study {record.name} has no right kernel: {progress.recorded} candidates were recorded.")
    if op := sys.modules.get("evoattn.ops.runtime"):  # the op has been called: it looks for winners anew
        op.current.forget()
    return SearchResult(record.name, prepared.plan.problem, prepared.words.database, leaders[0], progress, kept)
