"""The processes of a new search, asked for as soon as it is known what is searched: they import what they need while
the search's own process imports the database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

from evoattn.backends import compiler
from evoattn.evaluation import server
from evoattn.evaluation.workers import BaseWorker
from evoattn.fleet.base import Fleet, MakeHandler
from evoattn.model.gpu import MADE_ROW
from evoattn.model.timeline import mark
from evoattn.samplers.for_problem import sampler_of
from evoattn.search import ahead
from evoattn.search.ahead import AheadSampler
from evoattn.search.machines import Machines
from evoattn.search.request import DEFAULT_CACHE, DEFAULT_SAMPLER, SearchPlan, SearchWords
from evoattn.search.tools import Tools


class Crew:
    """A `Fleet` with its workers under way, and `sampler`, whose process is too."""

    def __init__(self, words: SearchWords, plan: SearchPlan, fleet: Fleet, tools: Tools) -> None:
        self._fleet, self.jobs, self.boards = fleet, fleet.jobs, fleet.boards
        self._devices: Sequence[BaseWorker] = ()
        if len(self.boards) == 1:  # several are forked from the server, for which this process would wait here
            of_device = plan.problem, plan.gpu, words.cache or DEFAULT_CACHE
            self._devices = fleet.devices(tools.make_device, of_device)
        made_of = words.sampler or DEFAULT_SAMPLER, plan.spaces, plan.problem, plan.gpu, words.seed or 0
        self.sampler = AheadSampler.start(sampler_of, *made_of)
        self._compilers = fleet.compilers(tools.make_compiler, (plan.problem, plan.gpu, False), beside=True)
        server.start()

    def compilers(self, make_handler: MakeHandler, args: tuple[Any, ...], beside: bool = False) -> Sequence[BaseWorker]:
        """Those that were begun, for the same words."""
        return self._compilers

    def devices(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> Sequence[BaseWorker]:
        """Those that were begun, for the same words, else the fleet's."""
        return self._devices or self._fleet.devices(make_handler, args)

    def referee(self, make_handler: MakeHandler, args: tuple[Any, ...]) -> BaseWorker | None:
        """The fleet's."""
        return self._fleet.referee(make_handler, args)

    def stop(self) -> None:
        """End what was begun; the fleet is its maker's to stop."""
        for worker in (*self._devices, *self._compilers):
            worker.stop()
        ahead.stop(self.sampler)


@contextmanager
def begun(
    words: SearchWords, plan: SearchPlan, machines: Machines, tools: Tools | None = None
) -> Iterator[Crew | None]:
    """The crew of a new search until the context ends; None for one that has to wait for its own: where nothing is
    timed the sampler has no process, and a card without a row in the table is measured first."""
    if plan.device is None or plan.gpu.note == MADE_ROW:
        yield None
        return
    crew = Crew(words, plan, machines.fleet(words, plan), tools or Tools())
    Thread(target=compiler.version, daemon=True).start()  # loads NVRTC, whose version the study records
    mark("workers are asked for")
    try:
        yield crew
    finally:
        crew.stop()
