"""The processes of a new search, asked for as soon as it is known what is searched: they import what they need, and
compile its first candidates, while the search's own process imports the database."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from evoattn.backends import compiler
from evoattn.engine.budget import parse_budget
from evoattn.engine.candidates import Compilers, Pending
from evoattn.engine.loop import EARLY
from evoattn.engine.tools import Tools
from evoattn.evaluation import server
from evoattn.evaluation.workers import BaseWorker, check_all, wait_for_any
from evoattn.families import registry
from evoattn.fleet.base import Fleet, MakeHandler
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import MADE_ROW
from evoattn.model.timeline import mark
from evoattn.samplers.for_problem import sampler_of
from evoattn.search import ahead
from evoattn.search.ahead import AheadSampler
from evoattn.search.machines import Machines
from evoattn.search.request import DEFAULT_CACHE, DEFAULT_SAMPLER, SearchPlan, SearchWords

LOOK_SECONDS = 0.05
"""Between two looks at whether the search is ready to go on itself."""


class EarlyStart:
    """A `Fleet` with its workers under way, and the search's sampler, whose process is too. Until `take_over` the
    sampler's first proposals go to the compile workers."""

    def __init__(self, words: SearchWords, plan: SearchPlan, fleet: Fleet, tools: Tools) -> None:
        self._fleet, self.jobs, self.boards, self._plan = fleet, fleet.jobs, fleet.boards, plan
        made_of = words.sampler or DEFAULT_SAMPLER, plan.spaces, plan.problem, plan.gpu, words.seed or 0
        self._sampler = AheadSampler.start(sampler_of, *made_of)
        self._compilers = fleet.compilers(tools.make_compiler, (plan.gpu, False), beside=True)
        self._devices = fleet.devices(tools.make_device, (plan.problem, plan.gpu, words.cache or DEFAULT_CACHE))
        self._tools, self._most = tools, min(parse_budget(words.budget).trials or EARLY, EARLY)
        self._over, self._failure = Event(), list[FailedRun]()
        self._feeding = Thread(target=self._feed, daemon=True)
        self._feeding.start()

    def take_over(self) -> AheadSampler:
        """The sampler, which is the caller's from now on, as the workers are; some have candidates. Raises `FailedRun`
        where a process failed until now."""
        self._over.set()
        self._feeding.join()
        if self._failure:
            raise self._failure[0]
        return self._sampler

    def _feed(self) -> None:
        try:
            self._give_proposals(Compilers(self._compilers, self._tools))
        except FailedRun as error:
            self._failure.append(error)

    def _give_proposals(self, compilers: Compilers) -> None:
        """To each compile worker one, `EARLY` at most, or as many as the budget has."""
        plan, fresh = self._plan, [*self._compilers]
        while fresh and self._most and not self._over.is_set():
            wait_for_any([self._sampler.worker, *(w for w in fresh if not w.ready)], LOOK_SECONDS)
            self._sampler.listen()
            for worker in fresh:
                if not worker.ready:
                    worker.poll()
            check_all([self._sampler.worker, *fresh])
            for worker in [w for w in fresh if w.idle]:
                if not (proposals := self._sampler.ask(1)):
                    break
                family = registry.lookup(proposals[0].family)
                config = plan.spaces[family.name].make_config(proposals[0].params)
                if not self._most or family.why_invalid(plan.problem, config, plan.gpu):  # the search says so
                    self._sampler.put_back(proposals[0])
                    return
                compilers.submit(Pending(proposals[0], family, config, plan.problem, plan.gpu), worker)
                fresh.remove(worker)
                self._most -= 1

    def compilers(self, make_handler: MakeHandler, args: tuple[Any, ...], beside: bool = False) -> Sequence[BaseWorker]:
        """Those that were begun, for the same words."""
        return self._compilers

    def devices(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> Sequence[BaseWorker]:
        """Those that were begun, for the same words."""
        return self._devices

    def referee(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> BaseWorker | None:
        """The fleet's."""
        return self._fleet.referee(make_handler, args)

    def stop(self) -> None:
        """End what was begun; the fleet is its maker's to stop."""
        self._over.set()
        self._feeding.join()
        for worker in (*self._devices, *self._compilers):
            worker.stop()
        ahead.stop(self._sampler)


@contextmanager
def begun(
    words: SearchWords,
    plan: SearchPlan,
    machines: Machines,
    tools: Tools | None = None,
    at_once: Callable[[], bool] = server.is_light,
) -> Iterator[EarlyStart | None]:
    """The early of a new search until the context ends; None for one that has to wait for its own: where nothing is
    timed the sampler has no process, a card without a row in the table is measured first, and where workers are not
    there `at_once` their server's imports are to be waited for."""
    if plan.device is None or plan.gpu.note == MADE_ROW or not at_once():
        yield None
        return
    early = EarlyStart(words, plan, machines.fleet(words, plan), tools or Tools())
    Thread(target=compiler.version, daemon=True).start()  # loads NVRTC, whose version the study records
    mark("workers are asked for")
    try:
        yield early
    finally:
        early.stop()
