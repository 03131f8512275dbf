"""Searches several groups of problems at once: compile processes, one GPU process, and a breeder per group."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evoattn.evaluation.pool import Pool, processes
from evoattn.evaluation.process import Ending, Handler
from evoattn.evaluation.workers import BaseWorker, Outcome, Worker, check_all, wait_for_any
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.families.render import render
from evoattn.model.gpu import GpuSpec
from evoattn.model.records import CompiledKernel
from evoattn.portfolio.engine.ahead import Ahead
from evoattn.portfolio.engine.breeding import Breeder
from evoattn.portfolio.engine.compiling import COMPILE_SECONDS, SourceHandler, compile_all
from evoattn.portfolio.engine.kernel import Group, Kernel
from evoattn.portfolio.engine.stage import Job, Stage

JOB_SECONDS, FINAL_SECONDS = 15.0, 60.0
QUEUE = 24
"""Compiled kernels that may wait for the GPU."""
SAMPLE = 3
"""Problems beside its own on which a new kernel is timed first, unless told otherwise."""
NEAR = 1.12
"""A kernel within this factor of the best on one of them is timed on more of the group's problems."""


@dataclass
class _Ready:
    group: Group
    kernel: Kernel
    compiled: CompiledKernel | None
    indexes: list[int]
    rest: list[int]
    check: bool = True


class Engine:
    """`run` for a time, then look at `groups`. A context manager: leaving it ends all processes.
    A kernel is timed on its own problem and `sample` others of its group, a promising one on `most`."""

    def __init__(
        self,
        groups: list[Group],
        gpu: GpuSpec,
        jobs: int | None = None,
        seed: int = 0,
        most: int = 12,
        stage: Callable[..., Handler] = Stage,
        sample: int = SAMPLE,
        breeder: Callable[[Group, GpuSpec, int], Breeder] = Breeder,
        sources: dict[str, CompiledKernel] | None = None,  # compiled already, by the hash of the source
        ahead: Ahead | None = None,  # to be timed while no other kernel waits for the GPU
        compiler: Callable[..., Handler] = SourceHandler,
    ) -> None:
        if len({g.name for g in groups}) < len(groups):  # breeders, and problems in the GPU process, go by name
            raise ValueError(f"Two groups have one name: {', '.join(g.name for g in groups)}.")
        self.groups, self.gpu, self.most, self.sample = groups, gpu, most, sample
        self._breeders = {g.name: breeder(g, gpu, seed) for g in groups}
        self._near = {g.name: g.near(gpu) for g in groups}
        self._searched: Sequence[Group] = groups
        self._pool = Pool(processes(jobs or max(1, (os.cpu_count() or 2) - 1), compiler))
        self._stage = Worker(stage)
        self._ready: deque[_Ready] = deque()
        self._sources, self._ahead = dict(sources or {}), ahead
        self._fresh = False  # the GPU process was replaced and has not been told the problems
        self.measured, self.compiled, self.busy_seconds = 0, 0, 0.0
        self.samples: dict[str, list[float]] = {}  # µs of each round of the last final, by kernel's index or peer

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.stop()
        self._stage.stop()

    def run(self, seconds: float, refresh: Callable[[], None] = lambda: None, among: Sequence[Group] = ()) -> None:
        """Search `among`, or all groups, for `seconds` from when the GPU process is up. Raises `WorkerFailed`."""
        self._searched = among or self.groups
        self._register_all()
        end, workers = time.monotonic() + seconds, [*self._pool.workers, self._stage]
        while time.monotonic() < end:
            self._feed()
            wait_for_any(workers, 0.05)
            self._collect()
            check_all(workers)
            refresh()
        while self._stage.busy:
            wait_for_any([self._stage], 0.1)
            if outcome := self._stage.poll():
                self._take(outcome)

    def _register_all(self) -> None:
        """Tell a fresh GPU process which problems there are."""
        for group in self.groups:
            self._ask(("register", group.name, group.problems), 60)

    def _ask(self, task: tuple[Any, ...], seconds: float) -> Outcome:
        """Run one task on the GPU process and wait for it; a fresh process is told the problems again."""
        outcome = self._stage.ask(task, seconds, earlier=self._take)
        if outcome.ending is not Ending.RESULT and task[0] != "register":
            self._register_all()
        return outcome

    def _feed(self) -> None:
        for worker in self._pool.idle():
            if len(self._ready) >= QUEUE:
                break
            self._propose(worker)
        if self._fresh and self._stage.ready:
            self._fresh = False
            self._register_all()
        while self._stage.idle and not self._fresh and (self._ready or self._take_ahead()):
            item = self._ready.popleft()
            best = tuple(item.group.best(i) for i in item.indexes)
            job = Job(item.group.name, self._built(item.kernel, item.compiled), item.check, tuple(item.indexes), best)
            self._stage.submit(item, ("job", job), JOB_SECONDS)

    def _propose(self, worker: BaseWorker) -> None:
        for _ in range(4):
            group = min(self._searched, key=lambda g: g.spent / g.weight)
            group.spent += 1
            if (proposal := self._breeders[group.name].propose()) is None:
                group.spent += 3
                continue
            kernel, target = proposal
            group.kernels[kernel.id] = kernel
            item = self._item(group, kernel, target)
            candidate = render(registry.lookup(kernel.family), group.problems[target], kernel.config, self.gpu)
            if known := self._sources.get(candidate.source_hash):
                self._compiled(item, known)
                continue
            worker.submit((item, candidate.source_hash), (candidate.source, candidate.arch), COMPILE_SECONDS)
            return

    def _item(self, group: Group, kernel: Kernel, target: int) -> _Ready:
        able = set(self._breeders[group.name].serves(kernel))
        others = [j for j in self._near[group.name][target] if j in able]
        return _Ready(group, kernel, None, [target, *others[: self.sample]], others[self.sample : self.most - 1])

    def _take_ahead(self) -> bool:
        """Make the next kernel that was compiled ahead ready; whether there was one."""
        if self._ahead is None or not (found := self._ahead.next()):
            return False
        planned, kernel, candidate, compiled = found
        self._sources[candidate.source_hash] = compiled
        self._compiled(self._item(planned.group, kernel, planned.target), compiled)
        return True

    def _built(self, kernel: Kernel, compiled: CompiledKernel | None) -> BuiltKernel:
        assert compiled is not None  # it waits for the GPU only once it is compiled
        return BuiltKernel(registry.lookup(kernel.family), kernel.config, self.gpu, compiled)

    def _collect(self) -> None:
        for outcome in self._pool.poll():
            item, source_hash = outcome.tag
            self.compiled += 1
            item.kernel.compile_seconds = outcome.seconds
            if outcome.ending is not Ending.RESULT or isinstance(outcome.value, str):
                item.kernel.state = f"compile: {outcome.value}"
                continue
            self._sources[source_hash] = outcome.value
            self._compiled(item, outcome.value)
        if ended := self._stage.poll():
            self._take(ended)
            self._feed()

    def _compiled(self, item: _Ready, compiled: CompiledKernel) -> None:
        item.compiled = compiled
        item.kernel.registers, item.kernel.spill_bytes = compiled.info.registers, compiled.info.spill_bytes
        self._ready.append(item)

    def _take(self, outcome: Outcome) -> None:
        """A finished job: its times, and more problems for a promising kernel."""
        item = outcome.tag
        if not isinstance(item, _Ready):
            return
        self.busy_seconds += outcome.seconds
        kernel, group = item.kernel, item.group
        kernel.device_seconds += outcome.seconds
        if outcome.ending is not Ending.RESULT or isinstance(outcome.value, str):
            kernel.state = str(outcome.value) if outcome.ending is Ending.RESULT else f"launch: {outcome.value}"
            self._fresh = self._fresh or not self._stage.ready
            return
        kernel.state = "right"
        self.measured += len(outcome.value)
        near = False
        for index, (us, rough) in outcome.value.items():
            near = near or (not rough and us <= NEAR * group.best(index))
            kernel.times[index] = us
            if rough:
                kernel.rough.add(index)
        if near and item.rest:
            self._ready.appendleft(_Ready(group, kernel, item.compiled, item.rest, [], check=False))

    def serves(self, group: Group, kernel: Kernel) -> list[int]:
        """Indexes of the group's problems that the kernel can run."""
        return self._breeders[group.name].serves(kernel)

    def time_again(self, group: Group, kernel: Kernel, indexes: list[int]) -> dict[int, float]:
        """µs of a compiled kernel on some problems, measured as in the search; of those where it fails, none."""
        best = tuple(group.best(i) for i in indexes)
        if not (built := self._build_now(group, indexes[0], kernel)):
            return {}
        outcome = self._ask(("job", Job(group.name, built, False, tuple(indexes), best)), JOB_SECONDS)
        if outcome.ending is not Ending.RESULT or isinstance(outcome.value, str):
            return {}
        return {index: us for index, (us, rough) in outcome.value.items() if not rough}

    def final(
        self, group: Group, index: int, kernels: list[Kernel], rounds: int = 5, peers: tuple[str, ...] = ()
    ) -> tuple[list[float | None], dict[str, float], dict[str, str]]:
        """Median µs of each kernel and peer on one problem, taken in turns, and why peers are missing."""
        built = [self._build_now(group, index, k) for k in kernels]
        indexes = [i for i, b in enumerate(built) if b]
        outcome = self._ask(("final", group.name, index, [b for b in built if b], rounds, peers), FINAL_SECONDS)
        lost: Any = [], {}, {"all": str(outcome.value)}, {}
        times, theirs, refusals, samples = outcome.value if outcome.ending is Ending.RESULT else lost
        self.samples = {str(indexes[int(n)]) if n.isdigit() else n: values for n, values in samples.items()}
        known = dict(zip(indexes, times, strict=False))
        return [known.get(i) for i in range(len(kernels))], theirs, refusals

    def prove(self, group: Group, index: int, kernel: Kernel) -> str:
        """Why the kernel is wrong on one problem; an empty string where it is right."""
        built = self._build_now(group, index, kernel)
        return str(self._ask(("prove", group.name, index, built), FINAL_SECONDS).value) if built else "It has no code."

    def _build_now(self, group: Group, index: int, kernel: Kernel) -> BuiltKernel | None:
        """None where it cannot be compiled."""
        candidate = render(registry.lookup(kernel.family), group.problems[index], kernel.config, self.gpu)
        if candidate.source_hash not in self._sources:
            self.compile_all([(group, kernel)])
        compiled = self._sources.get(candidate.source_hash)
        return self._built(kernel, compiled) if compiled else None

    def compile_all(self, wanted: list[tuple[Group, Kernel]]) -> None:
        """Compile the kernels that are not compiled yet, on all processes. Raises `WorkerFailed`."""
        found = [render(registry.lookup(k.family), g.problems[0], k.config, self.gpu) for g, k in wanted]
        self._sources |= compile_all(self._pool, (c for c in found if c.source_hash not in self._sources))
        for (_, kernel), candidate in zip(wanted, found, strict=True):
            if compiled := self._sources.get(candidate.source_hash):
                kernel.registers, kernel.spill_bytes = compiled.info.registers, compiled.info.spill_bytes
