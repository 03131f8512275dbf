"""The search of `driver_ceiling.py`, with a meter around its parts."""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from core_time import CoreTime

from driver.fakes import INFO, FakeCompiler, FakeDevice
from evoattn.evaluation.workers import wait_for_any
from evoattn.fleet.local import LocalFleet
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import lookup
from evoattn.model.records import CompiledKernel
from evoattn.samplers.for_problem import sampler_of
from evoattn.search import ahead
from evoattn.search.ahead import AheadSampler
from evoattn.search.budget import Budget
from evoattn.search.loop import Search
from evoattn.search.spaces import choose_spaces
from evoattn.search.tools import Tools
from evoattn.storage import Storage


class Meter:
    """Wall seconds and CPU seconds of their thread of the calls that pass through it, by name."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def around(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **words: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return work(*args, **words)
            finally:
                self.wall[name] = self.wall.get(name, 0.0) + time.perf_counter() - wall
                self.cpu[name] = self.cpu.get(name, 0.0) + time.thread_time() - cpu
                self.calls[name] = self.calls.get(name, 0) + 1

        return measured


def measured(given: argparse.Namespace, db: str) -> None:
    problem, gpu, meter = lookup(given.problem), GPUS["h200"], Meter()
    spaces = choose_spaces((), (), True, problem, gpu)
    storage = Storage.open(db)
    study = storage.create_study("ceiling", problem, gpu, False, given.sampler, 0, tuple(spaces), {}, {})
    made_of = given.sampler, spaces, problem, gpu, 0
    sampler = sampler_of(*made_of) if given.inside else AheadSampler.start(sampler_of, *made_of)
    for name in ("ask", "tell"):
        setattr(sampler, name, meter.around(name, getattr(sampler, name)))
    record_all = storage.record_all

    def on_a_slow_disk(*words: Any) -> Any:
        time.sleep(1e-3 * given.disk_ms)
        return record_all(*words)

    storage.record_all = meter.around("write", on_a_slow_disk)  # type: ignore[method-assign]
    tools = Tools(
        compile=lambda candidate: CompiledKernel(b"", "", INFO),
        make_compiler=partial(FakeCompiler, 1e-3 * given.compile_ms),
        make_device=partial(FakeDevice, 1e-3 * given.device_ms),
    )
    fleet = LocalFleet(given.jobs, [f"board {n}" for n in range(given.boards)], ("",) * given.boards)
    running = Search(storage, study, problem, gpu, spaces, sampler, fleet, tools=tools)
    while isinstance(sampler, AheadSampler) and not sampler.worker.ready:
        ahead.listen(sampler, wait_for_any(ahead.worker_of(sampler), 1.0))
    core = CoreTime(sampler.worker.pid) if isinstance(sampler, AheadSampler) else None
    driver = Driver(running, core)
    profile = cProfile.Profile(time.thread_time)
    if given.profile:
        profile.enable()
    progress = running.run(Budget(seconds=given.seconds), driver.look)
    profile.disable()
    storage.close()
    driver.say()
    for name in ("ask", "write", "tell"):
        if name in meter.cpu:
            print(
                f"  {name:<7} {1e3 * meter.cpu[name] / progress.recorded:6.2f} ms of CPU per candidate, "
                f"{1e3 * meter.wall[name] / progress.recorded:6.2f} ms of wall time"
            )
    print(f"{meter.calls['write']} transactions")
    if given.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


class Driver:
    """Its CPU time while it searches: from the first second, when its processes are up, to the final."""

    def __init__(self, running: Search, thinking: CoreTime | None) -> None:
        self._progress, self._thinking = running.progress, thinking
        self._first: tuple[float, ...] | None = None
        self._last: tuple[float, ...] = ()
        self._looks, self._compiling, self._ready = 0, 0, 0

    def look(self) -> None:
        progress = self._progress
        if progress.stage != "searching" or progress.seconds < 1.0:
            return
        self._looks += 1
        self._compiling += progress.compiling
        self._ready += progress.ready
        thought = self._thinking.look() if self._thinking else 0.0
        now = progress.recorded, progress.seconds, time.process_time(), time.thread_time(), thought
        now = *now, progress.device_seconds / progress.boards
        self._first, self._last = self._first or now, now

    def say(self) -> None:
        assert self._first is not None, "it searched for a second"
        count, seconds, cpu, loop, thought, busy = (b - a for a, b in zip(self._first, self._last, strict=True))
        rate, share = count / seconds, busy / seconds
        print(f"{count:.0f} candidates in {seconds:.1f} s: {rate:.0f} per second, boards {share:.0%} busy")
        compiling, ready = self._compiling / self._looks, self._ready / self._looks
        print(f"{compiling:.0f} compile, {ready:.0f} are ready, {self._looks / seconds:.0f} passes per second")
        for what, spent in (("driver", cpu), ("its loop's thread", loop), ("sampler's process", thought)):
            print(f"{what}: {1e3 * spent / count:.2f} ms of CPU per candidate, {spent / seconds:.0%} of a core")
