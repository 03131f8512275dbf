"""The loop: propose → render → compile → validate → benchmark → record → tell, within a budget; then the final."""

from __future__ import annotations

from collections.abc import Callable

from evoattn.evaluation.endings import failed
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Compile, Compiled, Evaluate
from evoattn.evaluation.workers import Outcome, Pool, Worker, wait_for_any
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Evaluation, Proposal, Study, TrialState
from evoattn.model.space import SearchSpace
from evoattn.samplers.base import Sampler
from evoattn.search import finalists
from evoattn.search.budget import RESERVE_MOST, Budget, Clock, reserve_of
from evoattn.search.candidates import Pending, Ready
from evoattn.search.device import Device
from evoattn.search.finals import Final
from evoattn.search.progress import Progress
from evoattn.search.recorder import Recorder
from evoattn.search.tools import Tools
from evoattn.storage import Storage
from evoattn.timing.finalists import FinalResult
from evoattn.timing.protocol import CacheMode

READY_PER_COMPILER = 2
"""Compiled candidates that may queue, per compile worker: enough to choose the promising from, few enough to stay
fresh."""
FINAL_SECONDS = 2 * RESERVE_MOST
"""A try at the final that takes longer is ended."""
POLL_SECONDS = 0.1
"""Longest wait for a worker between two refreshes of the display."""


class Search:
    """One run of a study. `run` returns when the budget is spent, the spaces are exhausted, or `KeyboardInterrupt`
    came."""

    def __init__(
        self,
        storage: Storage,
        study: Study,
        problem: AttentionProblem,
        gpu: GpuSpec,
        spaces: dict[str, SearchSpace],
        sampler: Sampler,
        jobs: int,
        cache: CacheMode = "warm",
        sanitize: bool = False,
        tools: Tools | None = None,
    ) -> None:
        self.storage, self.study, self.problem, self.gpu = storage, study, problem, gpu
        self.spaces, self.sampler, self.jobs, self.cache, self.sanitize = spaces, sampler, jobs, cache, sanitize
        self.tools = tools or Tools()
        self.progress = Progress()
        self.interrupted = self.exhausted = False
        self._ready = Ready()
        self._recorder = Recorder(storage, study, sampler, self.progress)

    def run(self, budget: Budget, refresh: Callable[[], None] = lambda: None) -> Progress:
        """Search until the budget is spent; `refresh` is called several times per second.

        Raises `SearchError`, `WorkerFailed` or `StorageError`.
        """
        self._budget, self._refresh = budget, refresh
        self._clock = Clock(budget, 0.0 if self.study.offline else reserve_of(budget))
        self._recorder.restore(self.problem, self.gpu, self.spaces)
        self._pool = Pool(self.jobs, self.tools.make_compiler, (self.problem, self.gpu, self.study.offline))
        self._device: Device | None = None
        if not self.study.offline:
            worker = Worker(self.tools.make_device, (self.problem, self.gpu, self.cache))
            self._device = Device(worker, self.progress, self.tools.device_seconds)
        try:
            self._loop()
            if self._device and self.progress.best is not None:
                self._hold_final(self._device)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self._pool.stop()
            if self._device:
                self._device.worker.stop()
        self.progress.stage = "done"
        return self.progress

    def _loop(self) -> None:
        workers = [*self._pool.workers, *([self._device.worker] if self._device else [])]
        while not self._clock.spent(self.progress.recorded):
            self._start_clock()
            self._feed_pool()
            self._feed_device()
            if self.exhausted and not self._on_the_way():
                return
            wait_for_any(workers, POLL_SECONDS)
            for outcome in self._pool.poll():
                self._compiled(outcome)
            if self._device and (timed := self._device.poll()):
                self._timed(timed)
            for worker in workers:
                worker.check()
            self._show()

    def _start_clock(self) -> None:
        """The budget's time runs from when a candidate can be measured: a compile worker is up, and the GPU worker has
        measured the peers."""
        up = any(w.ready for w in self._pool.workers) and (not self._device or self._device.up)
        if up and self._clock.started is None:
            self._clock.start()
            self.progress.started, self.progress.device_seconds = self._clock.started, 0.0

    def _show(self) -> None:
        progress = self.progress
        progress.compiling, progress.ready = self._pool.in_flight, len(self._ready)
        if self._device:
            progress.on_device = self._device.state
        progress.stage = "starting workers" if progress.started is None else "searching"
        self._refresh()

    def _on_the_way(self) -> int:
        """Candidates that are compiled, wait for the device, or are on it."""
        return self._pool.in_flight + len(self._ready) + bool(self._device and self._device.worker.busy)

    def _wanted(self) -> int:
        """How many more candidates may start now: a trial budget is not overrun by those on their way."""
        room = len(self._pool.idle())
        if not self.study.offline:
            room = min(room, READY_PER_COMPILER * self.jobs - len(self._ready))
        if self._budget.trials is not None:
            room = min(room, self._budget.trials - self.progress.recorded - self._on_the_way())
        return max(room, 0)

    def _feed_pool(self) -> None:
        while not self.exhausted and (wanted := self._wanted()):
            proposals = self.sampler.ask(wanted)
            if not proposals:
                self.exhausted = not self._on_the_way()
                return
            for proposal in proposals:
                self._enter(proposal)

    def _enter(self, proposal: Proposal) -> None:
        """Render a proposal and hand it to the pool, or record why not (invalid, or behaves like an earlier trial)."""
        family, config = registry.lookup(proposal.family), self.spaces[proposal.family].make_config(proposal.params)
        if reason := family.why_invalid(self.problem, config, self.gpu):
            self._recorder.record(proposal, config, None, Evaluation(TrialState.INVALID_CONFIG, reason))
            return
        candidate = self.tools.render(family, self.problem, config, self.gpu)
        identity = candidate.source_hash, family.launches(self.problem, config, self.gpu)
        if earlier := self._recorder.seen.earlier(identity):
            reason = f"It renders the same source and launches it as {earlier} does."
            self._recorder.record(proposal, config, candidate, Evaluation(TrialState.DUPLICATE, reason))
            return
        pending = Pending(proposal, family, config, candidate, identity)
        task = Compile(family, config, candidate)
        self._pool.idle()[0].submit(pending, task, self.tools.compile_seconds)

    def _compiled(self, outcome: Outcome) -> None:
        """A compile worker's result: into the queue of the device, or recorded."""
        pending, answer = outcome.tag, outcome.value
        if outcome.ending is not Ending.RESULT:
            answer = failed(outcome, "compile")
        elif isinstance(answer, Compiled):
            if answer.failure is None:
                self._ready.add(pending, answer)
                return
            answer = answer.failure
        self._recorder.record_pending(pending, answer)

    def _feed_device(self) -> None:
        """Give an idle device the most promising candidate, or its first measurement of the peers."""
        device = self._device
        if not device or device.wants_peers() or not device.worker.idle or not self._ready:
            return
        pending, best = self._ready.take(), self.progress.best
        assert pending.kernel is not None, "who waits for the device is compiled"
        best_us = best.timing.median_us if best and best.timing else None
        task = Evaluate(BuiltKernel(pending.family, pending.config, self.gpu, pending.kernel), best_us)
        device.worker.submit(pending, task, self.tools.device_seconds)

    def _timed(self, result: Outcome | FinalResult) -> None:
        """The GPU worker's result: a candidate's, or the peers' first times."""
        if isinstance(result, FinalResult):
            self._recorder.record_peers(result.timings, result.refusals)
            return
        pending: Pending = result.tag
        evaluation = result.value if result.ending is Ending.RESULT else failed(result, "device")
        if evaluation.doubtful and not pending.again:
            self._ready.add_again(pending)
        else:
            self._recorder.record_pending(pending, evaluation)

    # ---- the final

    def _hold_final(self, device: Device) -> None:
        """The best candidates and every peer, interleaved, so that all are measured under the same conditions."""
        self.progress.stage = "final"
        chosen = finalists.choose(self.storage, self.study, self.problem, self.gpu, self.spaces, self.tools)

        def earlier(outcome: Outcome) -> None:
            if result := device.take(outcome):
                self._timed(result)

        result = device.hold(Final(chosen), FINAL_SECONDS, self._refresh, earlier)
        if self.sanitize:
            self.progress.stage = "compute-sanitizer"
            finalists.sanitize(self.problem, chosen, result.timings, self._refresh)
        self._recorder.record_final(chosen, result)
