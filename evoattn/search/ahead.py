"""A sampler in a process of its own, which makes proposals before they are wanted."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from evoattn.engine.tools import SearchError
from evoattn.evaluation.process import Ending, Handler
from evoattn.evaluation.workers import BaseWorker, Worker
from evoattn.model.records import Proposal, Trial
from evoattn.samplers.base import Sampler

AHEAD = 16
"""Proposals that wait at most, for each GPU: few, as they do not know of later results. A GPU evaluates as many in half
a second. Half of them or more are thought of at once: of eight and more the guided sampler makes each in a third of the
time, and its core is one that no compile has."""
FIRST = 10
"""Proposals of the first answer at most: known-good configs, for which nothing is thought of, so that the first compile
does not wait for thoughts."""
THINK_SECONDS = 120.0
"""An answer of the sampler that takes longer ends the search; `AHEAD` proposals take 0.02 to 0.2 s."""


@dataclass(frozen=True)
class Think:
    """For the sampler's process: take in the trials `restored` and `told`, then propose `count` configs. The answer is
    `Proposed`."""

    count: int
    restored: tuple[Trial, ...] = ()
    told: tuple[tuple[Proposal, Trial], ...] = ()


@dataclass(frozen=True)
class Proposed:
    """The answer to `Think`. Fewer proposals than were asked for: there are no more. `rejected`: see `ConfigPool`."""

    proposals: list[Proposal]
    rejected: Counter[str] = field(default_factory=Counter)


class Thinking(Handler):
    """What the sampler's process runs."""

    def __init__(self, make: Callable[..., Sampler], *args: Any) -> None:
        self._sampler = make(*args)

    def __call__(self, task: Think) -> Proposed:
        if task.restored:
            self._sampler.restore(task.restored)
        for proposal, trial in task.told:
            self._sampler.tell(proposal, trial)
        return Proposed(self._sampler.ask(task.count), self._sampler.rejected)


class AheadSampler:
    """A `Sampler` whose `ask` never waits: it gives the proposals that are there, at times none. `has_more` tells that
    from the end."""

    def __init__(self, worker: BaseWorker) -> None:
        """`worker` runs `Thinking`."""
        self.worker, self.rejected, self.has_more = worker, Counter[str](), True
        self.ahead = AHEAD
        self._begun = False
        self._proposals: deque[Proposal] = deque()
        self._restored: tuple[Trial, ...] = ()
        self._told: list[tuple[Proposal, Trial]] = []

    @classmethod
    def start(cls, make: Callable[..., Sampler], *args: Any) -> AheadSampler:
        """With a process in which `make(*args)` makes the sampler."""
        return cls(Worker(Thinking, (make, *args), beside=True))

    def ask(self, n: int) -> list[Proposal]:
        """Up to `n` proposals that are there. Raises `SearchError` where the sampler's process failed."""
        if len(self._proposals) < n:
            self.listen()
        taken = [self._proposals.popleft() for _ in range(min(n, len(self._proposals)))]
        self._think()
        return taken

    def put_back(self, proposal: Proposal) -> None:
        """It is the next one that is asked for."""
        self._proposals.appendleft(proposal)

    def tell(self, proposal: Proposal, trial: Trial) -> None:
        """What became of a proposal; the sampler hears of it when it is asked next."""
        self._told.append((proposal, _bare(trial)))

    def restore(self, trials: Iterable[Trial]) -> None:
        """See `Sampler.restore`."""
        self._restored = tuple(map(_bare, trials))

    def listen(self) -> None:
        """Take in an answer that has come, and ask for more. Raises `SearchError`."""
        was_up, outcome = self.worker.ready, self.worker.poll()
        if outcome and outcome.ending is not Ending.RESULT:
            raise SearchError(f"The sampler cannot go on: {outcome.value}")
        if was_up and not self.worker.ready:  # a fresh one would know nothing of what it proposed
            raise SearchError("The sampler cannot go on: its process ended.")
        if outcome:
            answer: Proposed = outcome.value
            self._proposals += answer.proposals
            self.has_more, self.rejected = len(answer.proposals) == outcome.tag, answer.rejected
        self._think()

    def _think(self) -> None:
        wanted = self.ahead - len(self._proposals)
        if self.worker.idle and self.has_more and wanted >= self.ahead // 2:
            count = wanted if self._begun else min(wanted, FIRST)
            task = Think(count, self._restored, tuple(self._told))
            self._restored, self._told, self._begun = (), [], True
            self.worker.submit(count, task, THINK_SECONDS)


def provide_for(sampler: Sampler, boards: int) -> None:
    """Have an `AheadSampler` think ahead for so many GPUs."""
    if isinstance(sampler, AheadSampler):
        sampler.ahead = AHEAD * max(1, boards)


def has_more(sampler: Sampler) -> bool:
    """Whether a sampler that has just given nothing may give more later: only an `AheadSampler` does."""
    return isinstance(sampler, AheadSampler) and sampler.has_more


def worker_of(sampler: Sampler) -> list[BaseWorker]:
    """That of an `AheadSampler`, to wait for. Of others nothing."""
    return [sampler.worker] if isinstance(sampler, AheadSampler) else []


def listen(sampler: Sampler, heard: Collection[BaseWorker]) -> None:
    """Have an `AheadSampler` take in what its process sent, if it is among the `heard`."""
    if isinstance(sampler, AheadSampler) and sampler.worker in heard:
        sampler.listen()


def stop(sampler: Sampler) -> None:
    """End the process of a sampler that has one."""
    if isinstance(sampler, AheadSampler):
        sampler.worker.stop()


def _bare(trial: Trial) -> Trial:
    """The trial without what no sampler looks at."""
    return replace(trial, reason="", source_hash=None, compile_info=None, validation=None)
