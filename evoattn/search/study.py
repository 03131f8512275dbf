"""One run of a study: propose → render and compile → check → time → record → tell, within a budget; then the final."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from evoattn.engine.budget import RESERVE_MOST, Budget, Clock, reserve_of
from evoattn.engine.candidates import Compilers, Pending, tried_again
from evoattn.engine.device import Device
from evoattn.engine.devices import Devices
from evoattn.engine.finals import Final
from evoattn.engine.loop import Loop
from evoattn.engine.progress import Progress
from evoattn.engine.tools import Tools
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import Compiled, Evaluate
from evoattn.evaluation.workers import BaseWorker, Outcome, failed
from evoattn.families import registry
from evoattn.fleet.base import Fleet
from evoattn.model.records import Evaluation, Study, TrialState
from evoattn.model.timeline import mark
from evoattn.samplers.base import Sampler
from evoattn.search import ahead, finalists
from evoattn.search.recorder import Recorder
from evoattn.search.request import DEFAULT_CACHE, SearchPlan
from evoattn.storage import Storage
from evoattn.timing.protocol import FinalResult

FINAL_SECONDS = 2 * RESERVE_MOST
"""A try at the final that takes longer is ended."""


class Search(Loop):
    """One run of a study. `run` returns when the budget is spent, the spaces are exhausted, or `KeyboardInterrupt`
    came."""

    def __init__(
        self,
        storage: Storage,
        study: Study,
        plan: SearchPlan,
        sampler: Sampler,
        fleet: Fleet,
        sanitize: bool = False,
        tools: Tools | None = None,
    ) -> None:
        super().__init__(fleet, tools)
        self.storage, self.study, self.sampler, self.sanitize = storage, study, sampler, sanitize
        self.problem, self.gpu, self.spaces = plan.problem, plan.gpu, plan.spaces
        self._kept = storage, study, plan.problem, plan.gpu, plan.spaces, self.tools
        self.interrupted = False
        self._recorder = Recorder(storage, study, sampler, self.progress)

    def run(self, budget: Budget, refresh: Callable[[], None] = lambda: None) -> Progress:
        """Search until the budget is spent; `refresh` is called often. Raises `SearchError`, `WorkerFailed` or
        `StorageError`."""
        self._budget, self._refresh = budget, refresh
        self._clock = Clock(budget, 0.0 if self.study.offline else reserve_of(budget))
        self._devices, self._compilers = None, Compilers([], self.tools)
        try:
            self._recorder.restore(self.problem, self.gpu, self.spaces)
            self._start_workers()
            mark("the loop begins")
            self._loop()
            self._recorder.flush(wait=True)
            mark("the final begins")
            if self._devices and self.progress.best is not None:
                self._hold_final(self._devices)
        except KeyboardInterrupt:
            self.interrupted = True
        finally:
            self._compilers.stop()
            ahead.stop(self.sampler)
            if self._devices:
                self._devices.stop()
            self._recorder.stop()
        mark("the search ends")
        self.progress.stage = "done"
        return self.progress

    def _start_workers(self) -> None:
        offline = self.study.offline
        if not offline:
            cache = self.study.options.get("cache", DEFAULT_CACHE)
            of_device = self.problem, self.gpu, cache  # before the others, as it takes them longest to start
            self._devices = Devices.start(self.fleet, self.tools, of_device, self.progress)
        ahead.provide_for(self.sampler, len(self.fleet.boards))
        compilers = self.fleet.compilers(self.tools.make_compiler, (self.gpu, offline), beside=not offline)
        self._compilers = Compilers(compilers, self.tools)
        if self._devices and (reference := finalists.reference(*self._kept, len(self.fleet.boards) > 1)):
            self._devices.scale.refer_to(reference)

    def _begin_next(self, idle: list[BaseWorker]) -> bool:
        proposals = self.sampler.ask(1)
        for proposal in proposals:
            family, config = registry.lookup(proposal.family), self.spaces[proposal.family].make_config(proposal.params)
            if reason := family.why_invalid(self.problem, config, self.gpu):
                self._recorder.record(proposal, config, Evaluation(TrialState.INVALID_CONFIG, reason))
            else:
                self._compilers.submit(Pending(proposal, family, config, self.problem, self.gpu), idle.pop())
        return bool(proposals)

    def _compiled(self, pending: Pending, answer: Compiled | Evaluation) -> None:
        """Into the queue of the devices, or recorded."""
        if pending.behaviour is not None and (earlier := self._recorder.seen.earlier(pending.behaviour)):
            reason = f"It renders the same source and launches it as {earlier} does."
            pending, answer = replace(pending, behaviour=None), Evaluation(TrialState.DUPLICATE, reason)
        if isinstance(answer, Compiled):
            self._ready.add(pending, answer)
        else:
            self._recorder.record_pending(pending, answer)

    def _task(self, pending: Pending, device: Device) -> Evaluate:
        best = self.progress.best
        best_us = best.timing.median_us if best and best.timing else None
        assert self._devices is not None, "the device is one of them"
        return Evaluate(pending.built, best_us and best_us * self._devices.scale.factor(device.board))

    def _take(self, device: Device, outcome: Outcome) -> None:
        pending: Pending = outcome.tag
        evaluation = outcome.value if outcome.ending is Ending.RESULT else failed(outcome, "device")
        if evaluation.doubtful and not pending.again:
            self._ready.add_again(tried_again(pending, outcome))
            return
        assert self._devices is not None, "its device is one of them"
        learn = partial(self._devices.learn, device, pending)
        self._recorder.record_pending(pending, self._devices.marked(device, evaluation), learn)
        if self._devices.compared and not self._devices.scale.reference:
            self._recorder.flush(wait=True)  # no other board is asked for a time before this one may be the reference

    def _take_peers(self, result: FinalResult) -> None:
        self._recorder.record_peers(result.timings, result.refusals)
        mark("peers are measured")

    def _between(self) -> None:
        self._recorder.flush()

    def _more(self) -> bool:
        return ahead.has_more(self.sampler)

    @property
    def _waiting(self) -> int:
        return self._recorder.waiting

    @property
    def _due(self) -> float:
        return self._recorder.due

    def _others(self) -> Sequence[BaseWorker]:
        return ahead.worker_of(self.sampler)

    def _hear(self, heard: Collection[BaseWorker]) -> None:
        ahead.listen(self.sampler, heard)

    def _hold_final(self, devices: Devices) -> None:
        """The best candidates and every peer, interleaved on one board, so that all are measured under the same
        conditions. All boards end what they have before."""
        self.progress.stage = "final"
        self._end_devices_tasks(devices)
        self._recorder.flush(wait=True)
        chosen = finalists.choose(*self._kept)
        result = devices.referee.hold(Final(chosen), FINAL_SECONDS, self._refresh, self._take_peers, devices.for_final)
        if self.sanitize:
            self.progress.stage = "compute-sanitizer"
            finalists.sanitize(self.problem, chosen, result.timings, self._refresh)
        self._recorder.record_final(chosen, result)
