"""One search for `scale.py`, in a process of its own: what it did per second, on how many boards, as one line of JSON.

    python -m benchmarks.scale.search (one|two|four|all|ray) SHAPE SECONDS DB [--jobs N] [--sampler NAME] [--kill AFTER]
                                    [--fake N] [--no-final]

`one` is `--devices 0`, `two` and `four` have so many, `all` is `--devices all`, `ray` is `--ray local`. `--kill` ends a
GPU worker by kill -9 that many seconds into the search. `--fake` puts N made-up GPUs, which answer after 20 ms, in
place of the real ones. `--no-final` ends the search before its own final: its winner is then the best of its search.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.scale.core_time import CoreTime
from evoattn.engine.progress import Progress
from evoattn.engine.tools import Tools
from evoattn.evaluation.handlers import DeviceHandler
from evoattn.evaluation.workers import Worker
from evoattn.fleet.ray_fleet import LOCAL, RayFleet
from evoattn.model.paths import ROOT
from evoattn.model.records import Study, Trial
from evoattn.search import ahead
from evoattn.search.machines import Machines, machines_of
from evoattn.search.request import SearchWords, plan, read_words
from evoattn.search.setup import begin_study, make_search
from evoattn.search.study import Search
from evoattn.storage import Storage
from evoattn.storage.versions import collect
from tests.faults.search import KERNEL, FakeCompiler, FakeDevice, journaled, made_up, made_up_here

LOOK_SECONDS = 0.05
"""Between two looks at the search, which are the driver's CPU time too."""
BEYOND = 60.0
"""Seconds by which the budget of a search is larger that is ended from here."""
DEVICES = {"one": "0", "two": "0,1", "four": "0,1,2,3", "all": "all"}


@dataclass
class Row:
    """One search. Rates are of the time between the first worker up and the final."""

    mode: str
    boards: int
    jobs: int
    seconds: float = 0.0
    starting: float = 0.0
    """Until the first compile worker and the first GPU worker were up."""
    recorded: int = 0
    measured: int = 0
    busy: float = 0.0
    """Share of the time in which a GPU worker had a task, the mean over the boards."""
    driver: float = 0.0
    """CPU seconds of the process with the loop and the database, per second."""
    sampler: float = 0.0
    """CPU seconds of the sampler's process, per second."""
    compiling: float = 0.0
    """Compile workers with a candidate, the mean over the search."""
    ready: float = 0.0
    """Compiled candidates that wait for a board, the mean over the search."""
    writes: int = 0
    """Transactions: the results that come at once share one."""
    write_ms: float = 0.0
    """Wall time of a transaction."""
    states: dict[str, int] = field(default_factory=dict)
    speeds: dict[str, float] = field(default_factory=dict)
    improvements: list[tuple[float, float]] = field(default_factory=list)
    killed: int = 0
    """GPU workers ended by kill -9."""
    twice: int = 0
    """Configs that were recorded more than once."""
    family: str = ""
    config: dict[str, object] = field(default_factory=dict)
    best_us: float = 0.0
    """In the search's own final."""
    peer: str = ""
    peer_us: float = 0.0


class TimedStorage(Storage):
    """Adds up the time of its transactions."""

    writing, writes = 0.0, 0

    def record_all(self, *arguments: Any, **named: Any) -> list[Trial]:
        started = time.perf_counter()
        trials = super().record_all(*arguments, **named)
        TimedStorage.writing += time.perf_counter() - started
        TimedStorage.writes += 1
        return trials


class Observer:
    """Looks at a running search several times per second; ends one GPU worker on the way."""

    def __init__(self, running: Search, row: Row, journal: Path, kill_after: float | None, seconds: float) -> None:
        """`seconds`: when to end the search without its final."""
        self._progress, self._row, self._journal, self._kill_after = running.progress, row, journal, kill_after
        self._ends = seconds
        self._cpu: float | None = None
        self._thinking = [
            CoreTime(worker.pid) for worker in ahead.worker_of(running.sampler) if isinstance(worker, Worker)
        ]
        self._looks, self._next = 0, 0.0

    def __call__(self) -> None:
        progress, row = self._progress, self._row
        if progress.started is None or progress.stage != "searching" or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        if self._cpu is None:
            self._cpu, self._from, row.starting = time.process_time(), progress.seconds, progress.starting_seconds
            self._thought = sum(core.look() for core in self._thinking)
        row.seconds, row.recorded, row.measured = progress.seconds, progress.recorded, progress.measured
        row.busy = progress.busy_share
        seconds = max(1e-9, row.seconds - self._from)
        row.driver = (time.process_time() - self._cpu) / seconds
        row.sampler = (sum(core.look() for core in self._thinking) - self._thought) / seconds
        self._looks += 1
        row.compiling += (progress.compiling - row.compiling) / self._looks
        row.ready += (progress.ready - row.ready) / self._looks
        if self._kill_after is not None and row.seconds > self._kill_after and not row.killed:
            workers = [int(line.split()[2]) for line in self._journal.read_text().splitlines()]
            os.kill(workers[row.boards - 1], signal.SIGKILL)  # later ones may be the referee's
            row.killed = 1
        if row.seconds > self._ends:
            raise KeyboardInterrupt


def machines_for(mode: str, words: SearchWords, fake: int) -> AbstractContextManager[Machines]:
    """A context with the machines of a mode."""
    if not fake:
        return machines_of(words)
    if mode == "ray":
        return FakeCluster(words, fake)
    return FakeHost(fake)


class FakeHost:
    """This machine with made-up GPUs."""

    def __init__(self, count: int) -> None:
        self._devices = [made_up(number) for number in range(count)]

    def __enter__(self) -> Machines:
        return Machines(self._devices)

    def __exit__(self, *error: object) -> None:
        pass


class FakeCluster:
    """A Ray cluster of this machine with made-up GPUs."""

    def __init__(self, words: SearchWords, count: int) -> None:
        os.environ["PYTHONPATH"] = str(ROOT)
        size = {"num_cpus": words.processes + count, "num_gpus": count}
        self._fleet = RayFleet(LOCAL, words.jobs, size, made_up_here)

    def __enter__(self) -> Machines:
        return Machines(self._fleet.detect(), self._fleet)

    def __exit__(self, *error: object) -> None:
        self._fleet.stop()


def search(given: argparse.Namespace) -> Row:
    journal = Path(given.db).with_suffix(".workers")
    device = FakeDevice if given.fake else DeviceHandler
    tools = Tools(make_device=partial(journaled, str(journal), device))
    if given.fake:
        tools = replace(tools, compile=lambda candidate: KERNEL, make_compiler=FakeCompiler)
    words = SearchWords(
        budget=f"{given.seconds + (BEYOND if given.no_final else 0)}s",
        shape=given.shape,
        db=given.db,
        jobs=given.jobs,
        sampler=given.sampler,
        devices=DEVICES.get(given.mode),
        ray=LOCAL if given.mode == "ray" else None,
    )
    request = read_words(words)
    assert request.problem is not None
    with machines_for(given.mode, words, given.fake) as machines:
        wanted = plan(words, request.problem, machines.devices)
        prepared = begin_study(request, wanted)
        prepared.storage.close()
        storage = TimedStorage.open(given.db, create=False)
        storage.use_environment(collect(wanted.device))
        prepared = replace(prepared, storage=storage)
        running = make_search(prepared, machines, tools)
        fleet = machines.fleet(words, wanted)
        row = Row(given.mode, len(fleet.boards), fleet.jobs)
        ends = given.seconds if given.no_final else math.inf
        progress = running.run(prepared.budget, Observer(running, row, journal, given.kill, ends))
        fill(row, progress, storage, running.study)
        storage.close()
    return row


def fill(row: Row, progress: Progress, storage: Storage, study: Study) -> None:
    """What is known once the search has ended."""
    row.states = {str(state): count for state, count in storage.counts(study).items()}
    row.speeds, row.improvements = progress.speeds, progress.improvements
    row.writes, row.write_ms = TimedStorage.writes, 1e3 * TimedStorage.writing / max(1, TimedStorage.writes)
    seen = [t.config_id for t in storage.iter_trials(study)]
    row.twice = len(seen) - len(set(seen))
    for leader in storage.leaderboard(study, 1):
        row.family, row.config = leader.family, leader.config
        row.best_us = leader.timing.median_us if leader.timing else 0.0
    if progress.best_peer:
        row.peer, row.peer_us = progress.best_peer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=[*DEVICES, "ray"])
    parser.add_argument("shape")
    parser.add_argument("seconds", type=float)
    parser.add_argument("db")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--sampler")
    parser.add_argument("--kill", type=float)
    parser.add_argument("--fake", type=int, default=0)
    parser.add_argument("--no-final", action="store_true")
    print(json.dumps(asdict(search(parser.parse_args()))))
    return 0


if __name__ == "__main__":  # worker processes import this file again
    sys.exit(main())
