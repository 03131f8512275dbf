"""The loop: propose → render → compile → validate → benchmark → record → tell, within a budget; then the finals."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from evoattn.evaluation.evaluate import Compiled, with_cost
from evoattn.evaluation.handlers import COMPILE_SECONDS, DEVICE_SECONDS, CompileHandler, DeviceHandler
from evoattn.evaluation.workers import Ending, Outcome, Pool, Worker, wait_for_any
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.families.render import render
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, Evaluation, Proposal, Study, Timing, Trial, TrialState
from evoattn.model.space import KernelConfig, SearchSpace
from evoattn.samplers.base import Sampler
from evoattn.search import finals
from evoattn.search.budget import Budget, Clock
from evoattn.search.finals import Final
from evoattn.search.progress import Progress, value_of
from evoattn.storage import Storage
from evoattn.timing import benchmark, ranking
from evoattn.timing.contest import FinalResult

READY_A_COMPILER = 2
"""Compiled candidates waiting for the device, a compile worker: enough to choose the promising from, few enough to stay fresh."""
RESERVE_SHARE, RESERVE_SECONDS, RESERVE_MOST = 0.05, 3.0, 45.0
"""Part of a time budget kept for the finals: at least RESERVE_SECONDS, at most RESERVE_MOST."""


class SearchError(FailedRun):
    """The search cannot go on: its message is one sentence."""


@dataclass(frozen=True)
class _Pending:
    """A candidate on its way."""

    proposal: Proposal
    config: KernelConfig
    candidate: Candidate
    again: bool = False
    """It is evaluated a second time, in a fresh process, because the first one may have been harmed (`Evaluation.doubtful`)."""


class Search:
    """One run of a study. `run` returns when the budget is spent, the spaces are exhausted, or `KeyboardInterrupt` came."""

    def __init__(
        self,
        storage: Storage,
        study: Study,
        problem: AttentionProblem,
        gpu: GpuSpec,
        spaces: dict[str, SearchSpace],
        sampler: Sampler,
        jobs: int,
        cache: benchmark.CacheMode = "warm",
        sanitize: bool = False,
    ) -> None:
        self.storage, self.study, self.problem, self.gpu = storage, study, problem, gpu
        self.spaces, self.sampler, self.jobs, self.cache, self.sanitize = spaces, sampler, jobs, cache, sanitize
        self.progress = Progress()
        self.interrupted = self.exhausted = False
        self._ready: list[tuple[float, int, _Pending, Compiled]] = []
        self._order = itertools.count()
        self._seen: dict[tuple, int | None] = {}
        """What ran or is on its way (see `_identity`): the number of its trial once it has one."""
        self._device: Worker | None = None
        self._baselines = Final({})
        """The study's first measurement of the peers, before any candidate runs."""

    def run(self, budget: Budget, refresh: Callable[[], None] = lambda: None) -> Progress:
        """Search until the budget is spent; `refresh` is called several times a second. Raises `SearchError` or `StorageError`."""
        self._budget = budget
        reserve = min(RESERVE_MOST, max(RESERVE_SECONDS, RESERVE_SHARE * (budget.seconds or 0.0)))
        self._clock = Clock(budget, 0.0 if self.study.offline else reserve)
        self._restore()
        self._pool = Pool(self.jobs, CompileHandler, (self.problem, self.gpu, self.study.offline))
        if not self.study.offline:
            self._device = Worker(DeviceHandler, (self.problem, self.gpu, self.cache))
        try:
            self._loop(refresh)
            if not self.study.offline and self.progress.best is not None:
                self._finals(refresh)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self._pool.stop()
            if self._device:
                self._device.stop()
        self.progress.stage = "done"
        return self.progress

    # ---- before the loop

    def _restore(self) -> None:
        """Refill sampler and tables from the trials recorded so far: the database is the only memory of a study."""
        trials = list(self.storage.iter_trials(self.study))
        self.sampler.restore(trials)
        for trial in trials:
            if trial.source_hash and (config := finals.config_of(trial, self.spaces)):
                self._seen[self._identity(config, trial.source_hash)] = trial.number
            self.progress.take(trial)
        for name, timings in self.storage.baselines(self.study).items():
            self.progress.peers[name] = timings[-1].median_us

    def _identity(self, config: KernelConfig, source_hash: str) -> tuple:
        """What tells one behaviour from another: the source and how it is launched."""
        return source_hash, registry.lookup(config.family).launches(self.problem, config, self.gpu)

    # ---- the loop

    def _start_clock(self) -> None:
        """The budget's time runs from when a candidate can be measured: a compile worker is up, the GPU worker has measured the peers."""
        up = any(w.ready for w in self._pool.workers) and (
            not self._device or (self._baselines.result and self._device.idle)
        )
        if up and self._clock.started is None:
            self._clock.start()
            self.progress.started, self.progress.device_seconds = self._clock.started, 0.0

    def _loop(self, refresh: Callable[[], None]) -> None:
        workers = [*self._pool.workers, *([self._device] if self._device else [])]
        while not self._clock.spent(self.progress.recorded):
            self._start_clock()
            self._feed_pool()
            self._feed_device()
            if self.exhausted and not self._on_the_way():
                return
            wait_for_any(workers, 0.1)
            for outcome in self._pool.poll():
                self._compiled(outcome)
            if self._device and (outcome := self._device.poll()):
                self._timed(outcome)
            self._check_workers(workers)
            self._show(refresh)

    def _show(self, refresh: Callable[[], None]) -> None:
        progress = self.progress
        progress.compiling, progress.ready = self._pool.in_flight, len(self._ready)
        if self._device:
            progress.on_device = "starting" if not self._device.ready else "busy" if self._device.busy else "waiting"
        progress.stage = "starting workers" if progress.started is None else "searching"
        refresh()

    def _check_workers(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            if worker.failures_to_start >= 3:
                raise SearchError(
                    f"A worker process failed to start three times; the last time: {worker.start_failure}"
                )

    def _on_the_way(self) -> int:
        """Candidates that are compiled, wait for the device, or are on it."""
        return self._pool.in_flight + len(self._ready) + bool(self._device and self._device.busy)

    def _wanted(self) -> int:
        """How many more candidates may enter the line now: a trial budget is not overrun by those on their way."""
        room = len(self._pool.idle())
        if not self.study.offline:
            room = min(room, READY_A_COMPILER * self.jobs - len(self._ready))
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
        """Render a proposal and hand it to the pool, or record why it got no further (invalid, or the source of an earlier trial)."""
        config = self.spaces[proposal.family].make_config(proposal.params)
        family = registry.lookup(proposal.family)
        if reason := family.why_invalid(self.problem, config, self.gpu):
            self._record(proposal, config, None, Evaluation(TrialState.INVALID_CONFIG, reason))
            return
        candidate = render(family, self.problem, config, self.gpu)
        identity = self._identity(config, candidate.source_hash)
        if identity in self._seen:
            earlier = self._seen[identity]
            which = f"trial {earlier}" if earlier else "a candidate still on its way"
            self._record(
                proposal,
                config,
                candidate,
                Evaluation(TrialState.DUPLICATE, f"It renders the same source and launches it as {which} does."),
            )
            return
        self._seen[identity] = None
        self._pool.idle()[0].submit(_Pending(proposal, config, candidate), (candidate, config), COMPILE_SECONDS)

    def _compiled(self, outcome: Outcome) -> None:
        """A compile worker's result: into the queue of the device, or recorded."""
        pending: _Pending = outcome.tag
        if outcome.ending is not Ending.RESULT:
            self._record_pending(pending, _ending(outcome, "compile"))
        elif isinstance(outcome.value, Evaluation):
            self._record_pending(pending, outcome.value)
        elif outcome.value.failure:
            self._record_pending(pending, outcome.value.failure)
        else:
            cost = outcome.value.relative_cost
            heapq.heappush(self._ready, (0.0 if cost is None else cost, next(self._order), pending, outcome.value))

    def _feed_device(self) -> None:
        """Give an idle device the most promising candidate, or its first measurement of the baselines."""
        if not (self._device and self._device.idle):
            return
        if not self._baselines.result:
            self._hold(self._baselines, benchmark.SCREEN, DEVICE_SECONDS * 3)
        elif self._ready:
            _, _, pending, compiled = heapq.heappop(self._ready)
            best = self.progress.best
            family = registry.lookup(pending.config.family)
            kernel = BuiltKernel(family, pending.config, self.gpu, compiled.kernel)
            task = kernel, best.timing.median_us if best else None
            self._submit((pending, compiled), "evaluate", task, DEVICE_SECONDS)

    def _submit(self, tag: Any, method: str, args: tuple, seconds: float) -> None:
        self._device.submit(tag, (method, args), seconds)

    def _timed(self, outcome: Outcome) -> None:
        """The GPU worker's result."""
        self.progress.device_seconds += outcome.seconds
        if outcome.tag is self._baselines:
            self._take(self._baselines, outcome, "The peers could not be measured: {}")
            if self._baselines.result:
                self._record_baselines(*self._baselines.result[:2])
            return
        pending, compiled = outcome.tag
        evaluation = outcome.value if outcome.ending is Ending.RESULT else _ending(outcome, "device")
        if evaluation.doubtful and not pending.again:
            heapq.heappush(self._ready, (-math.inf, next(self._order), replace(pending, again=True), compiled))
            return
        self._record_pending(pending, with_cost(evaluation, compiled.relative_cost, compiled.kernel.info))

    # ---- recording

    def _record_pending(self, pending: _Pending, evaluation: Evaluation) -> None:
        trial = self._record(pending.proposal, pending.config, pending.candidate, evaluation)
        self._seen[self._identity(pending.config, pending.candidate.source_hash)] = trial.number

    def _record(
        self, proposal: Proposal, config: KernelConfig, candidate: Candidate | None, evaluation: Evaluation
    ) -> Trial:
        trial = self.storage.record(self.study, config, candidate, evaluation, proposal.parents, proposal.operator)
        self.sampler.tell(proposal, trial)
        self.progress.recorded += 1
        self.progress.states[trial.state] += 1
        if self.progress.take(trial) and (value := value_of(trial)) is not None:
            self.progress.improvements.append((self.progress.seconds, value))
        return trial

    def _record_baselines(self, timings: dict[str, Timing], refusals: dict[str, str]) -> None:
        for name, timing in timings.items():
            self.storage.add_baseline(self.study, name, timing, "")
            self.progress.peers[name] = timing.median_us
        for name, reason in refusals.items():
            self.storage.add_baseline(self.study, name, None, reason)

    # ---- finals

    def _finals(self, refresh: Callable[[], None]) -> None:
        """The best candidates and every peer, interleaved, so that the winner is chosen by one and the same weather."""
        self.progress.stage = "finals"
        finalists = finals.choose(self.storage, self.study, self.problem, self.gpu, self.spaces)
        timings, refusals, _ = self._final_result(Final(finalists), refresh)
        if self.sanitize:
            self.progress.stage = "compute-sanitizer"
            finals.sanitize(self.problem, finalists, timings, refresh)
        for name in timings.keys() & finalists:
            self.storage.add_timing(int(name), timings[name])
            if why_out := timings[name].disqualified or timings[name].protocol.get("out"):
                self.progress.notes.append(f"trial {name} left the final: {why_out}")
        self._record_baselines({n: t for n, t in timings.items() if n not in finalists}, refusals)
        leaders = self.storage.leaderboard(self.study, len(finalists) or 1)
        self.progress.best = leaders[0] if leaders else None
        if leaders:
            ratios = ranking.against_leader({t.number: t.timing for t in leaders}, leaders[0].number)
            self.progress.tied_with = tuple(number for number, ratio in ratios.items() if ratio.tie)

    def _final_result(self, final: Final, refresh: Callable[[], None]) -> FinalResult:
        """Hold a final on the GPU worker, over as many tries as it takes."""
        device = self._device
        while not final.result:
            while not device.idle:  # the candidate in hand ends first, or hits its own deadline
                wait_for_any([device], 0.1)
                if outcome := device.poll():
                    self._timed(outcome)
                self._check_workers([device])
                refresh()
            self._hold(final, benchmark.FINAL, RESERVE_MOST * 2)
            while not (outcome := device.poll()):
                wait_for_any([device], 0.1)
                refresh()
            self.progress.device_seconds += outcome.seconds
            self._take(
                final, outcome, "The finals could not be held: {} All trials are recorded; `--resume` holds them again."
            )
        return final.result

    def _hold(self, final: Final, protocol: benchmark.Protocol, seconds: float) -> None:
        finalists, refused = final.task
        self._submit(final, "final", (finalists, protocol, refused), seconds)

    @staticmethod
    def _take(final: Final, outcome: Outcome, sentence: str) -> None:
        try:
            final.take(outcome)
        except finals.FinalFailed as error:
            raise SearchError(sentence.format(error)) from None


def _ending(outcome: Outcome, where: str) -> Evaluation:
    """The evaluation of a task that did not return."""
    if outcome.ending is Ending.TIMEOUT:
        return Evaluation(TrialState.TIMEOUT, f"On the {where} worker: {outcome.value}", seconds=outcome.seconds)
    if outcome.ending is Ending.DIED:
        return Evaluation(TrialState.WORKER_DIED, f"On the {where} worker: {outcome.value}", seconds=outcome.seconds)
    return Evaluation(
        TrialState.LAUNCH_ERROR if where == "device" else TrialState.COMPILE_ERROR,
        str(outcome.value),
        seconds=outcome.seconds,
    )
