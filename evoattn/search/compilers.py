"""The compile workers of a search: configs go in, rendered and compiled candidates come out."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from evoattn.evaluation.endings import failed
from evoattn.evaluation.pool import Pool
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Compile, Compiled, Rendered
from evoattn.evaluation.workers import BaseWorker, Outcome
from evoattn.families.behaviour import behaviour
from evoattn.model.gpu import GpuSpec
from evoattn.model.packed_source import PackedSource
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Evaluation
from evoattn.search.candidates import Pending, given_back, tried_again
from evoattn.search.tools import Tools


class Compilers:
    """A pool that gives each candidate its second try, where something else may have ended the first."""

    def __init__(self, workers: Sequence[BaseWorker], tools: Tools, problem: AttentionProblem, gpu: GpuSpec) -> None:
        self._pool, self._tools, self._problem, self._gpu = Pool(workers), tools, problem, gpu
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
        task = Compile(pending.family, pending.config, render=self._tools.render)
        worker.submit(pending, task, self._tools.compile_seconds)

    def poll(self, heard: Collection[BaseWorker]) -> Iterator[tuple[Pending, Compiled | Evaluation]]:
        """The candidates with which the `heard` are done, with their sources unless rendering itself failed; of one
        that does not compile the evaluation, offline of each."""
        for outcome in self._pool.poll(heard):
            pending = outcome.tag
            if given_back(outcome, pending):
                self._again.append(tried_again(pending, outcome))
                continue
            if (found := self._rendered(pending, outcome)) is None:
                yield pending, failed(outcome, "compile")
                continue
            answer = found.answer
            if isinstance(answer, Compiled) and answer.failure:
                answer = answer.failure
            yield replace(pending, source=found.source, behaviour=found.behaviour), answer

    def _rendered(self, pending: Pending, outcome: Outcome) -> Rendered | None:
        if isinstance(outcome.value, Rendered):
            return outcome.value
        # Its worker ended, and the source with it.
        try:
            candidate = self._tools.render(pending.family, self._problem, pending.config, self._gpu)
        except Exception:
            if outcome.ending is Ending.RESULT:
                raise
            return None  # that was what failed in the worker: a bug of ours costs one candidate, not the search
        answer = outcome.value if outcome.ending is Ending.RESULT else failed(outcome, "compile")
        known = behaviour(candidate.source_hash, pending.family, self._problem, pending.config, self._gpu)
        return Rendered(PackedSource.of(candidate), known, answer)

    def stop(self) -> None:
        """End all workers; tasks under way are lost."""
        self._pool.stop()
