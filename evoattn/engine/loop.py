"""The loop of every search: candidates are proposed, compiled and timed, each by processes of its own, until time,
trials or candidates are over."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import closing

from evoattn.engine.budget import Budget, Clock
from evoattn.engine.candidates import Compilers, Pending, Ready, given_back, tried_again
from evoattn.engine.device import Device
from evoattn.engine.devices import Devices
from evoattn.engine.progress import Progress
from evoattn.engine.tools import Tools
from evoattn.evaluation.tasks import Compiled, DeviceTask
from evoattn.evaluation.workers import BaseWorker, Listener, Outcome, check_all, wait_for_any
from evoattn.fleet.base import Fleet
from evoattn.model.records import Evaluation
from evoattn.model.timeline import mark
from evoattn.timing.protocol import FinalResult

EARLY = 10
"""Candidates that are compiled before a GPU worker is up: enough for the first leaderboard. More would take the cores
on which it imports torch."""
READY_PER_COMPILER = 2
"""Compiled candidates that may queue, per compile worker: enough to choose from, few enough to stay fresh."""
AT_ONCE = 8
"""Proposals that are handed to compile workers before boards are looked after again."""
POLL_SECONDS = 0.1
"""Longest wait for a worker between two refreshes of the display."""


class Loop(ABC):
    """What is searched, one problem or groups of them, is a subclass's to say: which candidate comes next, what a board
    does with it, and who learns of the answer."""

    def __init__(self, fleet: Fleet, tools: Tools | None) -> None:
        self.fleet, self.tools = fleet, tools or Tools()
        self.progress = Progress()
        self.exhausted = False
        self._ready = Ready()
        self._devices: Devices | None = None
        """None: nothing is timed."""
        self._compilers = Compilers([], self.tools)
        self._budget, self._clock = Budget(), Clock(Budget())
        self._refresh: Callable[[], None] = lambda: None

    @abstractmethod
    def _begin_next(self, idle: list[BaseWorker]) -> bool:
        """Hand the next candidate to one of the idle compile workers, which leaves the list, or end it; whether there
        was one."""

    @abstractmethod
    def _compiled(self, pending: Pending, answer: Compiled | Evaluation) -> None:
        """Into the queue of the boards, or its end."""

    @abstractmethod
    def _task(self, pending: Pending, device: Device) -> DeviceTask:
        """What a board does with a compiled candidate."""

    @abstractmethod
    def _take(self, device: Device, outcome: Outcome) -> None:
        """The end of a candidate's task."""

    def _take_peers(self, result: FinalResult) -> None:  # noqa: B027 (not all time peers)
        """The peers' first times."""

    def _between(self) -> None:  # noqa: B027 (not all write a database)
        """What is done in each turn of the loop, after the boards have work."""

    def _more(self) -> bool:
        """Whether there may be candidates later, where there is none now."""
        return True

    @property
    def _waiting(self) -> int:
        """Results that are not written down yet."""
        return 0

    @property
    def _due(self) -> float:
        """Seconds until `_between` may have something to do."""
        return POLL_SECONDS

    def _others(self) -> Sequence[BaseWorker]:
        """Workers beside compilers and boards, to wait for."""
        return ()

    def _hear(self, heard: Collection[BaseWorker]) -> None:  # noqa: B027 (not all have others)
        """Some workers have said something, of `_others` too."""

    def _loop(self) -> None:
        """Until the clock's time is spent, or nothing is left to try."""
        with closing(Listener()) as listener:
            while not self._clock.spent(self.progress.recorded):
                self._start_clock()
                self._feed_boards()  # before the database is written: a board does not wait for the disk
                self._between()
                more = self._feed_compilers()
                if self.exhausted and not self._on_the_way():
                    return
                of_boards = self._devices.workers if self._devices else []
                workers = [*self._others(), *self._compilers.workers, *of_boards]
                pause = 0.0 if more else min(POLL_SECONDS, self._due)
                heard = listener.wait(workers, pause)
                self._poll_boards(heard)
                for pending, answer in self._compilers.poll(heard):
                    self._compiled(pending, answer)
                self._hear(heard)
                check_all(heard)
                self._show()

    def _start_clock(self) -> None:
        """The budget's time runs from when a candidate can be measured: a compile worker and the first GPU worker are
        up."""
        up = any(w.ready for w in self._compilers.workers) and (not self._devices or self._devices.first.worker.idle)
        if up and self._clock.started is None:
            self._clock.start()
            mark("the budget's time begins")
            self.progress.started, self.progress.device_seconds = self._clock.started, 0.0

    def _show(self) -> None:
        progress = self.progress
        progress.compiling, progress.ready = self._compilers.in_flight, len(self._ready)
        progress.on_device = self._devices.state if self._devices else ""
        progress.stage = "starting workers" if progress.started is None else "searching"
        self._refresh()

    def _on_the_way(self) -> int:
        """Candidates that are compiled, wait for a device or a second compile, are on a device, or are written down."""
        busy = self._compilers.busy + (self._devices.busy if self._devices else 0)
        return busy + len(self._ready) + self._waiting

    def _wanted(self, idle: int) -> int:
        """How many more candidates may start now: a trial budget is not overrun by those on their way."""
        room = min(idle, AT_ONCE)
        if self._devices:
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
            if not self._begin_next(idle):
                self.exhausted = not self._on_the_way() and not self._more()
                return False
        return wanted > 0

    def _feed_boards(self) -> None:
        """Give each idle device the candidate that is to be timed first of those that are left."""
        for device in self._devices.free() if self._devices else ():
            if not self._ready:
                return
            pending = self._ready.take()
            device.submit(pending, self._task(pending, device))

    def _poll_boards(self, heard: Collection[BaseWorker] | None = None) -> None:
        for device, result in self._devices.poll(heard) if self._devices else ():
            if self.progress.stage == "searching":
                self._feed_boards()  # first, so that the board works on while this result is recorded
            if isinstance(result, FinalResult):
                self._take_peers(result)
            elif given_back(result, result.tag):
                self._ready.add_again(tried_again(result.tag, result))
            else:
                self._take(device, result)

    def _end_devices_tasks(self, devices: Devices) -> None:
        """Wait until no board has a candidate."""
        while devices.busy:
            wait_for_any(devices.workers, POLL_SECONDS)
            self._poll_boards()
            self._refresh()
