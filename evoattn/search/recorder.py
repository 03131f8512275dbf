"""Every result goes to the database first, then to those who learn from it: sampler, progress and the table of what
ran."""

import math
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from evoattn.engine.candidates import Pending, Seen
from evoattn.engine.progress import Progress
from evoattn.families import registry
from evoattn.families.built import behaviour
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Evaluation, Proposal, Study, Timing, Trial, TrialState
from evoattn.model.space import KernelConfig, SearchSpace
from evoattn.model.timeline import mark
from evoattn.samplers.base import Sampler
from evoattn.search.finalists import config_of
from evoattn.storage import Storage
from evoattn.storage.trials import NewTrial
from evoattn.timing.protocol import Finalists, FinalResult
from evoattn.timing.ranking import against_leader

SWITCH_SECONDS = 5e-4
"""Seconds for which the thread may hold Python's lock while the search waits for it; by default 5 ms
(`sys.setswitchinterval`)."""


class Writer:
    """Writes one batch of results at a time, each in a transaction of its own.

    Until `stop` it changes how often the threads of the process take turns."""

    def __init__(self, storage: Storage, study: Study) -> None:
        self._storage, self._study = storage, study
        self._thread = ThreadPoolExecutor(1, "results")
        self._batch: Future[list[Trial]] | None = None
        self._switch: float | None = None
        """As it was before the first batch."""

    @property
    def idle(self) -> bool:
        """Whether it has no batch whose trials were not taken."""
        return self._batch is None

    @property
    def done(self) -> bool:
        """Whether its batch is written, or could not be."""
        return self._batch is not None and self._batch.done()

    def begin(self, batch: Sequence[NewTrial]) -> None:
        """Write a batch; it is `idle`."""
        if self._switch is None:
            self._switch = sys.getswitchinterval()
            sys.setswitchinterval(min(self._switch, SWITCH_SECONDS))
        self._batch = self._thread.submit(self._storage.record_all, self._study, batch)

    def take(self) -> list[Trial]:
        """The trials of the batch, in its order; waits for them. Raises `StorageError`."""
        assert self._batch is not None, "there is a batch"
        batch, self._batch = self._batch, None
        return batch.result()

    def stop(self) -> None:
        """Wait for the batch under way; nobody takes it."""
        self._thread.shutdown()
        if self._switch is not None:
            sys.setswitchinterval(self._switch)


GATHER_SECONDS = 0.1
"""Between the beginnings of two transactions: each costs a flush of the disk, and as much CPU time as two results."""

WRITTEN_SECONDS = 0.01
"""Between two looks at whether a transaction has ended: it takes 1 to 10 ms."""

_Result = tuple[Proposal, NewTrial, str | None, Callable[[Trial], None]]


class Recorder:
    """Records one run of a study. Every method raises `StorageError`."""

    def __init__(self, storage: Storage, study: Study, sampler: Sampler, progress: Progress) -> None:
        self._storage, self._study, self._sampler, self._progress = storage, study, sampler, progress
        self.seen = Seen()
        self._queue: list[_Result] = []
        self._written: list[_Result] = []
        """What the writer has."""
        self._next = 0.0
        """When the next transaction may begin."""
        self._writer = Writer(storage, study)

    def restore(self, problem: AttentionProblem, gpu: GpuSpec, spaces: dict[str, SearchSpace]) -> None:
        """Refill sampler and tables from the trials recorded so far: the database is the only memory of a study."""
        trials = list(self._storage.iter_trials(self._study))
        self._sampler.restore(trials)
        for trial in trials:
            new = trial.source_hash is not None and trial.state is not TrialState.DUPLICATE
            if new and (config := config_of(trial, spaces)):
                family = registry.lookup(trial.family)
                known = behaviour(str(trial.source_hash), family, problem, config, gpu)
                self.seen.recorded(known, trial.number)
            self._progress.take(trial)
        for name, timings in self._storage.peers(self._study).items():
            self._progress.peers[name] = timings[-1].median_us

    @property
    def waiting(self) -> int:
        """Results that nobody was told of: those not yet written, and those under way."""
        return len(self._queue) + len(self._written)

    @property
    def due(self) -> float:
        """Seconds until `flush` may have something to do."""
        if not self._writer.idle:
            return WRITTEN_SECONDS
        return max(0.0, self._next - time.monotonic()) if self._queue else math.inf

    def record(self, proposal: Proposal, config: KernelConfig, evaluation: Evaluation) -> None:
        """Of a proposal that nothing was rendered of."""
        new = NewTrial(config, None, evaluation, proposal.parents, proposal.operator)
        self._queue.append((proposal, new, None, lambda trial: None))

    def record_pending(
        self, pending: Pending, evaluation: Evaluation, then: Callable[[Trial], None] = lambda trial: None
    ) -> None:
        """The end of a candidate's way, with what its compile found; `then` gets its trial."""
        if pending.kernel is not None:
            info = evaluation.compile_info or pending.kernel.info
            evaluation = replace(evaluation, relative_cost=pending.relative_cost, compile_info=info)
        proposal = pending.proposal
        new = NewTrial(pending.config, pending.source, evaluation, proposal.parents, proposal.operator)
        self._queue.append((proposal, new, pending.behaviour, then))

    def flush(self, wait: bool = False) -> None:
        """Tell of what is written, and have all that waits written in one transaction, `GATHER_SECONDS` after the one
        before. `wait`: at once, and until nothing waits."""
        while True:
            if self._writer.done or (wait and not self._writer.idle):
                self._tell()
            now = time.monotonic()
            if self._queue and self._writer.idle and (wait or now >= self._next):
                self._next = now + GATHER_SECONDS
                self._written, self._queue = self._queue, []
                self._writer.begin([new for _, new, _, _ in self._written])
            if not wait or self._writer.idle:
                return

    def _tell(self) -> None:
        trials = self._writer.take()
        written, self._written = self._written, []
        for (proposal, _, known, then), trial in zip(written, trials, strict=True):
            mark(f"trial {trial.number} {trial.state} {proposal.operator}")
            if known is not None:
                self.seen.recorded(known, trial.number)
            self._sampler.tell(proposal, trial)
            self._count(trial)
            then(trial)

    def _count(self, trial: Trial) -> None:
        progress = self._progress
        progress.recorded += 1
        progress.states[trial.state] += 1
        if progress.take(trial) and (value := trial.value) is not None:
            progress.improvements.append((progress.seconds, value))

    def stop(self) -> None:
        """Have all that waits written, whatever ended the search, and wait for it."""
        try:
            self.flush(wait=True)
        finally:
            self._writer.stop()

    def record_peers(self, timings: dict[str, Timing], refusals: dict[str, str]) -> None:
        """By peer: its times, or the sentence with which it refused."""
        self.flush(wait=True)
        for name, timing in timings.items():
            self._storage.add_peer(self._study, name, timing)
            self._progress.peers[name] = timing.median_us
        for name, reason in refusals.items():
            self._storage.add_peer(self._study, name, None, reason)

    def record_final(self, finalists: Finalists, result: FinalResult) -> None:
        """Add the final's times to its trials and peers; its winner and those that tie with it go to the progress."""
        progress, timings = self._progress, result.timings
        for name in timings.keys() & finalists.keys():
            self._storage.add_timing(int(name), timings[name])
            if why_out := timings[name].disqualified or timings[name].protocol.get("out"):
                progress.notes.append(f"trial {name} left the final: {why_out}")
        self.record_peers({n: t for n, t in timings.items() if n not in finalists}, result.refusals)
        leaders = self._storage.leaderboard(self._study, len(finalists) or 1)
        progress.best = leaders[0] if leaders else None
        if leaders:
            medians = {trial.number: trial.timing for trial in leaders if trial.timing}
            ratios = against_leader(medians, leaders[0].number)
            progress.tied_with = tuple(number for number, ratio in ratios.items() if ratio.tie)
