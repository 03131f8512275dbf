"""Candidates between the sampler and the database: those on their way, those compiled, and the table of all; and the
workers that compile them: configs go in, rendered and compiled candidates come out."""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from evoattn.engine.tools import Tools
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Compile, Compiled, Rendered
from evoattn.evaluation.workers import BaseWorker, Outcome, Pool, failed
from evoattn.families.base import Family
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, CompressedSource, Evaluation, Proposal
from evoattn.model.space import KernelConfig
from evoattn.samplers.base import STARTING


@dataclass(frozen=True)
class Pending:
    """A candidate on its way."""

    proposal: Proposal
    family: Family
    config: KernelConfig
    problem: AttentionProblem
    """That it is rendered for."""
    gpu: GpuSpec
    source: CompressedSource | None = None
    behaviour: str | None = None
    """These two once it is rendered."""
    kernel: CompiledKernel | None = None
    """Once it is compiled."""
    relative_cost: float | None = None
    again: bool = False
    """It has its second try, in a fresh process: the first one died, or may have been harmed
    (`Evaluation.doubtful`)."""

    @property
    def built(self) -> BuiltKernel:
        """Its kernel, once it is compiled."""
        assert self.kernel is not None, "it is compiled before it is run"
        return BuiltKernel(self.family, self.config, self.gpu, self.kernel)


def given_back(outcome: Outcome, pending: Pending) -> bool:
    """Whether a candidate whose task ended like this is tried once more, as something else may have ended it: a death
    once, the loss of a machine each time."""
    return outcome.ending is Ending.LOST or (outcome.ending is Ending.DIED and not pending.again)


def tried_again(pending: Pending, outcome: Outcome) -> Pending:
    """The candidate for its next try. The loss of a machine says nothing of it, and is not held against it."""
    return pending if outcome.ending is Ending.LOST else replace(pending, again=True)


class Ready:
    """Compiled candidates that wait for the device: those that a search begins with, then the most promising."""

    def __init__(self) -> None:
        self._heap: list[tuple[bool, float, int, Pending]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, pending: Pending, compiled: Compiled) -> None:
        """A candidate that the cost model cannot judge goes before those that it can; equal ones go in the order in
        which they came."""
        cost = compiled.relative_cost
        ready = replace(pending, kernel=compiled.kernel, relative_cost=cost)
        later = pending.proposal.operator != STARTING
        heapq.heappush(self._heap, (later, 0.0 if cost is None else cost, next(self._order), ready))

    def add_again(self, pending: Pending) -> None:
        """Before all others: another evaluation."""
        heapq.heappush(self._heap, (False, -math.inf, next(self._order), pending))

    def take(self) -> Pending:
        """The most promising. Raises `IndexError` if none waits."""
        return heapq.heappop(self._heap)[-1]


class Seen:
    """All behaviours that were recorded or are on their way."""

    def __init__(self) -> None:
        self._numbers: dict[str, int | None] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def earlier(self, behaviour: str) -> str | None:
        """Who behaves like this already, in words; None if nobody does, and then it is noted as on its way."""
        if behaviour not in self._numbers:
            self._numbers[behaviour] = None
            return None
        number = self._numbers[behaviour]
        return f"trial {number}" if number else "a candidate still on its way"

    def recorded(self, behaviour: str, number: int) -> None:
        """It has a trial now."""
        self._numbers[behaviour] = number


class Compilers:
    """A pool that gives each candidate its second try, where something else may have ended the first."""

    def __init__(self, workers: Sequence[BaseWorker], tools: Tools) -> None:
        self._pool, self._tools = Pool(workers), tools
        self._again = deque[Pending]()

    @property
    def workers(self) -> Sequence[BaseWorker]:
        return self._pool.workers

    @property
    def in_flight(self) -> int:
        """Candidates that compile now."""
        return self._pool.in_flight

    @property
    def busy(self) -> int:
        """Candidates that compile, or are to compile once more."""
        return self.in_flight + len(self._again)

    def idle(self) -> list[BaseWorker]:
        """Workers for fresh candidates: those that were given back come first."""
        idle = self._pool.idle()
        while self._again and idle:
            self.submit(self._again.popleft(), idle.pop())
        return idle

    def submit(self, pending: Pending, worker: BaseWorker) -> None:
        """Hand a candidate to an idle worker."""
        worker.submit(pending, self._task(pending), self._tools.compile_seconds)

    def _task(self, pending: Pending) -> Compile:
        return Compile(pending.family, pending.config, pending.problem, render=self._tools.render)

    def poll(self, heard: Collection[BaseWorker]) -> Iterator[tuple[Pending, Compiled | Evaluation]]:
        """The candidates with which the `heard` are done, with their sources unless rendering itself failed; of one
        that does not compile the evaluation, offline of each."""
        for outcome in self._pool.poll(heard):
            pending = outcome.tag
            if given_back(outcome, pending):
                self._again.append(tried_again(pending, outcome))
                continue
            found = outcome.value if outcome.ending is Ending.RESULT else self._rendered_here(pending, outcome)
            if found is None:
                yield pending, failed(outcome, "compile")
                continue
            answer = found.answer
            if isinstance(answer, Compiled) and answer.failure:
                answer = answer.failure
            yield replace(pending, source=found.source, behaviour=found.behaviour), answer

    def _rendered_here(self, pending: Pending, outcome: Outcome) -> Rendered | None:
        """A candidate whose worker ended, and the source with it; None if it cannot be rendered here either: that was
        what failed there, a bug of ours, which costs one candidate and not the search."""
        task = self._task(pending)
        try:
            candidate = task.rendered(pending.gpu)
        except Exception:
            return None
        return Rendered.of(task, candidate, pending.gpu, failed(outcome, "compile"))

    def stop(self) -> None:
        """End all workers; tasks under way are lost."""
        self._pool.stop()
