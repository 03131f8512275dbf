"""A search for several groups of problems at once: a compiled kernel of a group is timed on more than one of them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from evoattn.engine.breeding import Breeder
from evoattn.engine.budget import Budget, Clock
from evoattn.engine.candidates import Compilers, Pending
from evoattn.engine.device import Device
from evoattn.engine.devices import Devices
from evoattn.engine.finals import Final
from evoattn.engine.groups import Group, Kernel
from evoattn.engine.loop import Loop
from evoattn.engine.tools import SearchError, Tools
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Compiled, Survey, Surveyed
from evoattn.evaluation.workers import BaseWorker, Outcome, check_all, wait_for_any
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.fleet.base import Fleet, LocalFleet
from evoattn.model.gpu import GpuSpec
from evoattn.model.records import CompiledKernel, Evaluation, Proposal
from evoattn.peers.labels import PEER_NAMES
from evoattn.timing.protocol import ORDER, FinalResult, Protocol

FINAL_SECONDS = 120.0
"""A try at a final that takes longer is ended."""
NEAR = 1.12
"""A kernel within this factor of the best on one of them is timed on more of the group's problems."""
SAMPLE, MOST = 3, 12
"""Problems beside its own on which a new kernel is timed first, and that a promising one is timed on."""
TRIES = 4
"""Groups that are asked for a config in a row before another turn of the loop."""


@dataclass(frozen=True)
class _Bred(Pending):
    """A candidate of a group, the problems to time it on, and those that follow where it is near the best."""

    group: Group | None = None
    bred: Kernel | None = None
    indexes: tuple[int, ...] = ()
    rest: tuple[int, ...] = ()
    check: bool = True

    @property
    def place(self) -> tuple[Group, Kernel]:
        assert self.group is not None and self.bred is not None
        return self.group, self.bred


class GroupSearch(Loop):
    """`run` for a time, then look at `groups`. A context manager: leaving it ends all processes."""

    def __init__(
        self,
        groups: Sequence[Group],
        gpu: GpuSpec,
        breeder: Callable[[Group, GpuSpec, int], Breeder] = Breeder,
        fleet: Fleet | None = None,
        tools: Tools | None = None,
    ) -> None:
        """`breeder`: makes who proposes kernels for a group, with (group, GPU, seed). `fleet`: this machine's first GPU
        and its cores unless given."""
        if len({g.name for g in groups}) < len(groups):  # breeders go by name
            raise ValueError(f"Two groups have one name: {', '.join(g.name for g in groups)}.")
        super().__init__(fleet or LocalFleet(max(1, (os.cpu_count() or 2) - 1)), tools)
        self.groups, self.gpu, self._breeder = list(groups), gpu, breeder
        self._asked: deque[tuple[Group, Kernel, tuple[int, ...]]] = deque()
        self._promising: deque[_Bred] = deque()
        """To be timed on more problems where no fresh kernel waits: of that the cost model learns more."""
        self._breeders = self._new_breeders()
        self._near = {g.name: g.near(gpu) for g in groups}
        self._searched: Sequence[Group] = self.groups
        self._code: dict[tuple[str, str], CompiledKernel] = {}
        """By group and kernel."""
        self.measured, self.compiled, self.busy_seconds = 0, 0, 0.0

    def __enter__(self) -> GroupSearch:
        self._devices = Devices.start(self.fleet, self.tools, (None, self.gpu, "warm"), self.progress)
        made = self.fleet.compilers(self.tools.make_compiler, (self.gpu, False), beside=True)
        self._compilers = Compilers(made, self.tools)
        return self

    def __exit__(self, *error: object) -> None:
        self._compilers.stop()
        if self._devices:
            self._devices.stop()

    def run(self, seconds: float, refresh: Callable[[], None] = lambda: None, among: Sequence[Group] = ()) -> None:
        """Search `among`, or all groups, for `seconds` from when a GPU process is up. Raises `WorkerFailed`."""
        self._searched, self._refresh, self.exhausted = among or self.groups, refresh, False
        self._clock = Clock(Budget(seconds=seconds))
        self._promising.clear()
        self._loop()
        if self._devices:
            self._end_devices_tasks(self._devices)

    def ask(self, asked: Sequence[tuple[Group, Kernel, tuple[int, ...]]]) -> None:
        """Go on with these kernels, or have the next `run` begin with them, each on those of the group's problems of
        these indexes that it was not timed on meanwhile, in place of what is left of earlier ones; breeders begin anew:
        the cost model says something else now."""
        self._asked.clear()
        for group, new, indexes in asked:
            kernel = group.kernels.setdefault(new.id, new)  # or a breeder would propose it, too
            left = tuple(i for i in indexes if i not in kernel.times)
            if left and kernel.state in ("new", "right"):
                self._asked.append((group, kernel, left))
        self._breeders = self._new_breeders()

    def _new_breeders(self) -> dict[str, Breeder]:
        return {g.name: self._breeder(g, self.gpu, 0) for g in self.groups}

    def _begin_next(self, idle: list[BaseWorker]) -> bool:
        if self._asked:
            group, kernel, indexes = self._asked.popleft()
            others = [i for i in self._others_of(group, kernel, indexes[0]) if i not in kernel.times]
            rest = tuple(i for i in others if i not in indexes)[: MOST - 1]
            pending = self._pending(group, kernel, indexes, rest)
            if pending.kernel:
                self._ready.add(pending, Compiled(pending.kernel, None))
            else:
                self._compilers.submit(pending, idle.pop())
            return True
        for _ in range(TRIES):
            group = min(self._searched, key=lambda g: g.spent / g.weight)
            group.spent += 1
            if proposal := self._breeders[group.name].propose():
                kernel, target = proposal
                group.kernels[kernel.id] = kernel
                self._compilers.submit(self._bred(group, kernel, target), idle.pop())
                return True
            group.spent += 3
        return False

    def _bred(self, group: Group, kernel: Kernel, target: int) -> _Bred:
        others = self._others_of(group, kernel, target)
        indexes, rest = (target, *others[:SAMPLE]), tuple(others[SAMPLE : MOST - 1])
        return self._pending(group, kernel, indexes, rest)

    def _others_of(self, group: Group, kernel: Kernel, target: int) -> list[int]:
        """The group's other problems that the kernel can run, those most like the target first."""
        able = set(self.serves(group, kernel))
        return [i for i in self._near[group.name][target] if i in able]

    def _pending(
        self, group: Group, kernel: Kernel, indexes: tuple[int, ...], rest: tuple[int, ...] = (), check: bool = True
    ) -> _Bred:
        family, proposal = registry.lookup(kernel.family), Proposal(kernel.family, kernel.params, (), kernel.origin)
        code = self._code.get((group.name, kernel.id))
        return _Bred(
            proposal, family, kernel.config, group.problems[indexes[0]], self.gpu, None, None, code, None, False,
            group, kernel, indexes, rest, check,
        )  # fmt: skip

    def _compiled(self, pending: Pending, answer: Compiled | Evaluation) -> None:
        assert isinstance(pending, _Bred)
        group, kernel = pending.place
        self.compiled += 1
        if isinstance(answer, Evaluation) or answer.kernel is None:
            failure = answer if isinstance(answer, Evaluation) else answer.failure
            kernel.state = f"compile: {failure.reason if failure else ''}"
            return
        self._code[group.name, kernel.id] = answer.kernel
        kernel.registers, kernel.spill_bytes = answer.kernel.info.registers, answer.kernel.info.spill_bytes
        kernel.compile_seconds = answer.kernel.info.seconds
        if pending.indexes and pending.check:
            self._ready.add(pending, replace(answer, relative_cost=None))  # costs of several problems do not compare

    def _feed_boards(self) -> None:
        """As ever; promising kernels are for the boards for which nothing fresh is ready, until the time is spent."""
        super()._feed_boards()
        if self._promising and not self._clock.spent(self.progress.recorded):
            for device in self._devices.free() if self._devices else ():
                if not self._promising:
                    return
                pending = self._promising.popleft()
                device.submit(pending, self._task(pending, device))

    def _task(self, pending: Pending, device: Device) -> Survey:
        assert isinstance(pending, _Bred)
        group, _ = pending.place
        problems = tuple(group.problems[i] for i in pending.indexes)
        return Survey(pending.built, problems, tuple(group.best(i) for i in pending.indexes), pending.check)

    def _take(self, device: Device, outcome: Outcome) -> None:
        """A finished task: its times, and more problems for a promising kernel."""
        pending = outcome.tag
        group, kernel = pending.place
        self.busy_seconds += outcome.seconds
        kernel.device_seconds += outcome.seconds
        answer = outcome.value if outcome.ending is Ending.RESULT else Surveyed(failure=f"launch: {outcome.value}")
        if answer.failure:
            kernel.state = answer.failure
            return
        kernel.state = "right"
        self.measured += len(answer.times)
        near = False
        for index, (us, rough) in zip(pending.indexes, answer.times, strict=True):
            near = near or (not rough and us <= NEAR * group.best(index))
            kernel.times[index] = us
            if rough:
                kernel.rough.add(index)
        if near and pending.rest:
            self._promising.append(replace(pending, indexes=pending.rest, rest=(), check=False, again=False))

    def serves(self, group: Group, kernel: Kernel) -> list[int]:
        """Indexes of the group's problems that the kernel can run."""
        return self._breeders[group.name].serves(kernel)

    def final(
        self, group: Group, index: int, kernels: Sequence[Kernel], protocol: Protocol = ORDER, peers: Sequence[str] = ()
    ) -> FinalResult:
        """Kernels, by their ids, and peers on one problem of a group, in turns. Kernels that do not compile are left
        out. Where it cannot be held nobody has a time, and `all` is refused with the reason."""
        assert self._devices is not None, "within the context"
        self.compile_all([(group, kernel) for kernel in kernels])
        codes = {kernel.id: self._code.get((group.name, kernel.id)) for kernel in kernels}
        finalists = {
            k.id: BuiltKernel(registry.lookup(k.family), k.config, self.gpu, code)
            for k in kernels
            if (code := codes[k.id])
        }
        refused = {name: "It is not asked." for name in PEER_NAMES if name not in peers}
        final = Final(finalists, protocol, refusals=refused, problem=group.problems[index])
        try:
            result = self._devices.referee.hold(final, FINAL_SECONDS, self._refresh, self._take_peers)
        except SearchError as error:
            return FinalResult({}, {"all": str(error)})
        asked = {name: why for name, why in result.refusals.items() if name not in refused}
        return FinalResult(result.timings, asked)

    def compile_all(self, wanted: Sequence[tuple[Group, Kernel]]) -> None:
        """Compile the kernels that are not compiled yet, on all processes. Raises `WorkerFailed`."""
        waiting = list({(g.name, k.id): (g, k) for g, k in wanted if (g.name, k.id) not in self._code}.values())
        while waiting or self._compilers.busy:
            for worker in self._compilers.idle()[: len(waiting)]:
                group, kernel = waiting.pop()
                index = next(iter(self.serves(group, kernel)), 0)
                self._compilers.submit(self._pending(group, kernel, (index,), check=False), worker)
            wait_for_any(self._compilers.workers, 0.2)
            for pending, answer in self._compilers.poll(self._compilers.workers):
                self._compiled(pending, answer)
            check_all(self._compilers.workers)
