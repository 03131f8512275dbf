"""The loop: propose → render and compile → validate → benchmark → record → tell, within a budget; then the final."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from evoattn.evaluation.endings import failed
from evoattn.evaluation.listener import Listener
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Compiled, Evaluate
from evoattn.evaluation.workers import BaseWorker, Outcome, check_all, wait_for_any
from evoattn.families import registry
from evoattn.fleet.base import Fleet
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Evaluation, Proposal, Study, TrialState
from evoattn.model.space import SearchSpace
from evoattn.model.timeline import mark
from evoattn.samplers.base import Sampler
from evoattn.search import ahead, finalists
from evoattn.search.boards import Boards
from evoattn.search.budget import RESERVE_MOST, Budget, Clock, reserve_of
from evoattn.search.candidates import Pending, Ready, given_back, tried_again
from evoattn.search.compilers import Compilers
from evoattn.search.device import Device
from evoattn.search.finals import Final
from evoattn.search.progress import Progress
from evoattn.search.recorder import Recorder
from evoattn.search.starting import EARLY
from evoattn.search.tools import Tools
from evoattn.storage import Storage
from evoattn.timing.finalists import FinalResult
from evoattn.timing.protocol import CacheMode

READY_PER_COMPILER = 2
"""Compiled candidates that may queue, per compile worker: enough to choose from, few enough to stay fresh."""
AT_ONCE = 8
"""Proposals that are handed to compile workers before boards are looked after again."""
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
        fleet: Fleet,
        cache: CacheMode = "warm",
        sanitize: bool = False,
        tools: Tools | None = None,
    ) -> None:
        self.storage, self.study, self.problem, self.gpu = storage, study, problem, gpu
        self.spaces, self.sampler, self.cache, self.sanitize = spaces, sampler, cache, sanitize
        self.tools, self.fleet = tools or Tools(), fleet
        self._kept = storage, study, problem, gpu, spaces, self.tools
        self.progress = Progress()
        self.interrupted = self.exhausted = False
        self._ready = Ready()
        self._recorder = Recorder(storage, study, sampler, self.progress)
        self._boards: Boards | None = None

    def run(self, budget: Budget, refresh: Callable[[], None] = lambda: None) -> Progress:
        """Search until the budget is spent; `refresh` is called often. Raises `SearchError`, `WorkerFailed` or
        `StorageError`."""
        self._budget, self._refresh = budget, refresh
        self._clock = Clock(budget, 0.0 if self.study.offline else reserve_of(budget))
        self._boards, self._compilers = None, self._compilers_of([])
        try:
            self._recorder.restore(self.problem, self.gpu, self.spaces)
            self._start_workers()
            mark("the loop begins")
            self._loop()
            self._recorder.flush(wait=True)
            mark("the final begins")
            if self._boards and self.progress.best is not None:
                self._hold_final(self._boards)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self._compilers.stop()
            ahead.stop(self.sampler)
            if self._boards:
                self._boards.stop()
            self._recorder.stop()
        mark("the search ends")
        self.progress.stage = "done"
        return self.progress

    def _compilers_of(self, workers: Sequence[BaseWorker]) -> Compilers:
        return Compilers(workers, self.tools, self.problem, self.gpu)

    def _start_workers(self) -> None:
        args = self.problem, self.gpu, self.study.offline
        if not self.study.offline:
            of_device = self.problem, self.gpu, self.cache  # before the others, as it takes them longest to start
            self._boards = Boards.start(self.fleet, self.tools, of_device, self.progress)
        ahead.provide_for(self.sampler, len(self.fleet.boards))
        compilers = self.fleet.compilers(self.tools.make_compiler, args, beside=not self.study.offline)
        self._compilers = self._compilers_of(compilers)
        if self._boards and (reference := finalists.reference(*self._kept, len(self.fleet.boards) > 1)):
            self._boards.scale.refer_to(reference)

    def _loop(self) -> None:
        with closing(Listener()) as listener:
            while not self._clock.spent(self.progress.recorded):
                self._start_clock()
                self._feed_boards()  # before the database is written: a board does not wait for the disk
                self._recorder.flush()
                more = self._feed_compilers()
                if self.exhausted and not self._on_the_way():
                    return
                of_boards = self._boards.workers if self._boards else []
                workers = [*ahead.worker_of(self.sampler), *self._compilers.workers, *of_boards]
                pause = 0.0 if more else min(POLL_SECONDS, self._recorder.due)
                heard = listener.wait(workers, pause)
                self._poll_boards(heard)
                for pending, answer in self._compilers.poll(heard):
                    self._compiled(pending, answer)
                ahead.listen(self.sampler, heard)
                check_all(heard)
                self._show()

    def _start_clock(self) -> None:
        """The budget's time runs from when a candidate can be measured: a compile worker and the first GPU worker are
        up."""
        up = any(w.ready for w in self._compilers.workers) and (not self._boards or self._boards.first.worker.idle)
        if up and self._clock.started is None:
            self._clock.start()
            mark("the budget's time begins")
            self.progress.started, self.progress.device_seconds = self._clock.started, 0.0

    def _show(self) -> None:
        progress = self.progress
        progress.compiling, progress.ready = self._compilers.in_flight, len(self._ready)
        progress.on_device = self._boards.state if self._boards else ""
        progress.stage = "starting workers" if progress.started is None else "searching"
        self._refresh()

    def _on_the_way(self) -> int:
        """Candidates that are compiled, wait for a device or a second compile, are on a device, or are written down."""
        busy = self._compilers.busy + (self._boards.busy if self._boards else 0)
        return busy + len(self._ready) + self._recorder.waiting

    def _wanted(self, idle: int) -> int:
        """How many more candidates may start now: a trial budget is not overrun by those on their way."""
        room = min(idle, AT_ONCE)
        if not self.study.offline:
            later = READY_PER_COMPILER * len(self._compilers.workers) - len(self._ready)
            room = min(room, EARLY - self._on_the_way() if self._clock.started is None else later)
        if self._budget.trials is not None:
            room = min(room, self._budget.trials - self.progress.recorded - self._on_the_way())
        return max(room, 0)

    def _feed_compilers(self) -> bool:
        """Give candidates to idle compile workers, a few at a time; whether there may be more to give at once."""
        idle = self._compilers.idle()
        wanted = 0 if self.exhausted else self._wanted(len(idle))
        for _ in range(wanted):
            proposals = self.sampler.ask(1)
            if not proposals:
                self.exhausted = not self._on_the_way() and not ahead.has_more(self.sampler)
                return False
            self._enter(proposals[0], idle)
        return wanted > 0

    def _enter(self, proposal: Proposal, idle: list[BaseWorker]) -> None:
        """Hand a proposal to an idle compile worker, or record why it cannot be."""
        family, config = registry.lookup(proposal.family), self.spaces[proposal.family].make_config(proposal.params)
        if reason := family.why_invalid(self.problem, config, self.gpu):
            self._recorder.record(proposal, config, Evaluation(TrialState.INVALID_CONFIG, reason))
        else:
            self._compilers.submit(Pending(proposal, family, config), idle.pop())

    def _compiled(self, pending: Pending, answer: Compiled | Evaluation) -> None:
        """Into the queue of the devices, or recorded."""
        if pending.behaviour is not None and (earlier := self._recorder.seen.earlier(pending.behaviour)):
            reason = f"It renders the same source and launches it as {earlier} does."
            pending, answer = replace(pending, behaviour=None), Evaluation(TrialState.DUPLICATE, reason)
        if isinstance(answer, Compiled):
            self._ready.add(pending, answer)
        else:
            self._recorder.record_pending(pending, answer)

    def _feed_boards(self) -> None:
        """Give each idle device the most promising candidate that is left."""
        if not self._boards:
            return
        best = self.progress.best
        best_us = best.timing.median_us if best and best.timing else None
        for device in self._boards.free():
            if not self._ready:
                return
            pending = self._ready.take()
            best_here = best_us and best_us * self._boards.scale.factor(device.board)
            device.submit(pending, Evaluate(pending.built(self.gpu), best_here))

    def _poll_boards(self, heard: Collection[BaseWorker] | None = None) -> None:
        for device, result in self._boards.poll(heard) if self._boards else ():
            if self.progress.stage == "searching":
                self._feed_boards()  # first, so that the board works on while this result is recorded
            self._timed(device, result)

    def _timed(self, device: Device, result: Outcome | FinalResult) -> None:
        """A GPU worker's result: a candidate's, or the peers' first times."""
        if isinstance(result, FinalResult):
            self._recorder.record_peers(result.timings, result.refusals)
            mark("peers are measured")
            return
        pending: Pending = result.tag
        evaluation = result.value if result.ending is Ending.RESULT else failed(result, "device")
        if given_back(result, pending) or (evaluation.doubtful and not pending.again):
            self._ready.add_again(tried_again(pending, result))
            return
        assert self._boards is not None, "its device is one of them"
        learn = partial(self._boards.learn, device, pending)
        self._recorder.record_pending(pending, self._boards.marked(device, evaluation), learn)
        if self._boards.compared and not self._boards.scale.reference:
            self._recorder.flush(wait=True)  # no other board is asked for a time before this one may be the reference

    def _hold_final(self, boards: Boards) -> None:
        """The best candidates and every peer, interleaved on one board, so that all are measured under the same
        conditions. All boards end what they have before."""
        self.progress.stage = "final"
        while boards.busy:
            wait_for_any(boards.workers, POLL_SECONDS)
            self._poll_boards()
            self._refresh()
        self._recorder.flush(wait=True)
        chosen = finalists.choose(*self._kept)
        late = partial(self._timed, boards.first)
        result = boards.referee.hold(Final(chosen), FINAL_SECONDS, self._refresh, late, boards.for_final)
        self._recorder.flush(wait=True)
        if self.sanitize:
            self.progress.stage = "compute-sanitizer"
            finalists.sanitize(self.problem, chosen, result.timings, self._refresh)
        self._recorder.record_final(chosen, result)
