"""The compile workers of a search: configs go in, rendered and compiled candidates come out."""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from evoattn.engine.candidates import Pending, given_back, tried_again
from evoattn.engine.tools import Tools
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Compile, Compiled, Rendered
from evoattn.evaluation.workers import BaseWorker, Outcome, Pool, failed
from evoattn.model.records import Evaluation


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
