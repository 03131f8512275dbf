"""A final over as many tries as it takes until all who are left have a time; and the referee, who times the peers and
holds it: a worker of its own on the first board, beside the one that times candidates.

The peers may take seconds to get going (FlashAttention 4 compiles for ten). They do so there while candidates are
timed; the board is theirs alone only for the fraction of a second in which they are timed themselves."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from enum import Enum

from evoattn.engine.device import Device
from evoattn.engine.tools import SearchError
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import HoldFinal, OnProblem
from evoattn.evaluation.workers import START_TRIES, BaseWorker, Outcome, WorkerFailed
from evoattn.model.errors import FailedRun
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Timing
from evoattn.peers.labels import PEER_NAMES
from evoattn.timing.protocol import FINAL, SCREEN, Finalists, FinalResult, Protocol

TRIES = 3
"""Tries per final: a GPU worker that died in a final, where no new candidate runs, may have been killed from
outside."""
DEATHS = 2
"""Deaths at its turn after which a contestant is out."""


class FinalFailed(FailedRun):
    """A final cannot be held: its message is one sentence."""


class Final:
    """One final. A contestant that breaks, kills or hangs the GPU worker is out of the next try."""

    def __init__(
        self,
        finalists: Finalists,
        protocol: Protocol = FINAL,
        peers: Collection[str] = PEER_NAMES,
        refusals: Mapping[str, str] | None = None,
        problem: AttentionProblem | None = None,
    ) -> None:
        """`refusals`: of peers that are known to take no part, by name. `problem`: where it is not the one that the
        GPU worker was made for."""
        self._problem = problem
        self._finalists, self._protocol, self._peers = finalists, protocol, peers
        self._timings: dict[str, Timing] = {}
        self._refusals = dict(refusals or {})
        self._deaths: Counter[str] = Counter()
        self.result: FinalResult | None = None
        """Once it is over: with everybody who was put out on the way."""

    @property
    def task(self) -> HoldFinal | OnProblem:
        """The next try, for the GPU worker."""
        left = {name: finalist for name, finalist in self._finalists.items() if name not in self._timings}
        task = HoldFinal(left, self._protocol, tuple(self._refusals))
        return OnProblem(self._problem, task) if self._problem else task

    def take(self, outcome: Outcome) -> None:
        """The end of a try. Raises `FinalFailed` where another would be no use."""
        if outcome.ending is Ending.RESULT:
            timings, refusals, complete = outcome.value
            self._timings |= timings
            self._refusals |= refusals
            if complete:
                self.result = FinalResult(self._timings, self._refusals)
            return
        whose = outcome.doing
        self._deaths[whose] += 1
        known = whose in self._finalists or whose in self._peers
        if known and outcome.ending is Ending.TIMEOUT:  # the try may have been slow before it came to this one's turn
            self._put_out(whose, f"The final was ended at its turn: {outcome.value}", disqualified=False)
        elif known and outcome.ending is Ending.DIED and self._deaths[whose] >= DEATHS:
            self._put_out(whose, f"{outcome.value} So it did {DEATHS} times at this one's turn.", disqualified=True)
        elif outcome.ending is not Ending.DIED or self._deaths.total() >= TRIES:
            raise FinalFailed(str(outcome.value))

    def _put_out(self, whose: str, sentence: str, disqualified: bool) -> None:
        if whose in self._peers:
            self._refusals[whose] = sentence
        else:
            self._timings[whose] = Timing.out(sentence, disqualified)
        self._deaths.clear()


PEERS_FACTOR = 3
"""The first measurement of the peers may take this many times as long as one candidate."""
BEGINS_AFTER = 8
"""Candidates recorded before the peers are prepared: the first leaderboard comes first."""


class _Stage(Enum):
    WAITING = "waiting"
    PREPARING = "preparing"
    """A first measurement whose times are not kept, as candidates run beside it."""
    TIMING = "timing"
    DONE = "done"


class Referee:
    """Times the peers and holds the final, and so says which kernel is best.

    `make` starts its worker; it gives None where the board can have only one, `device`'s, which then does this too.

    Where its own worker does not start, `device`'s takes over."""

    def __init__(self, make: Callable[[], BaseWorker | None], device: Device, seconds: float) -> None:
        """`seconds`: what one candidate may take."""
        self._make, self._device, self._seconds = make, device, PEERS_FACTOR * seconds
        self._own: BaseWorker | None = None
        self._stage = _Stage.WAITING
        self._peers = Final({}, SCREEN)

    @property
    def workers(self) -> list[BaseWorker]:
        """Its own, once there is one."""
        return [self._own] if self._own else []

    @property
    def _worker(self) -> BaseWorker:
        return self._own or self._device.worker

    @property
    def wants_board(self) -> bool:
        """Whether the first board is to be left to the peers now."""
        return self._stage is _Stage.TIMING

    @property
    def times_peers(self) -> bool:
        """Whether `device`'s worker is busy with the peers, not with a candidate."""
        return self._own is None and self._stage is _Stage.TIMING

    def go_on(self, recorded: int) -> None:
        """Begin what comes next; `recorded` candidates have a result."""
        if self._stage is _Stage.WAITING and recorded >= BEGINS_AFTER:
            self._own = self._make()
            self._stage = _Stage.PREPARING if self._own else _Stage.TIMING
        alone = not self._device.worker.busy or self._stage is _Stage.PREPARING
        if self._stage in (_Stage.PREPARING, _Stage.TIMING) and self._worker.idle and alone:
            self._worker.submit(self._peers, self._peers.task, self._seconds)

    def poll(self) -> FinalResult | None:
        """The peers' first times, once."""
        if self._own is None:
            return None
        outcome = self._own.poll()
        if self._own.failures_to_start >= START_TRIES:
            self._give_up_own()
        return self.take(outcome) if outcome else None

    def owns(self, outcome: Outcome) -> bool:
        """Whether an outcome of `device`'s worker is about the peers."""
        return outcome.tag is self._peers

    def take(self, outcome: Outcome) -> FinalResult | None:
        """The end of a try at the peers: their times, if they are to be kept."""
        try:
            self._peers.take(outcome)
        except FinalFailed:  # the final tries them again, and says why if it cannot be held
            self._stage = _Stage.DONE
        result = self._peers.result
        if result is None:
            return None
        if self._stage is _Stage.PREPARING:
            self._peers, self._stage = Final({}, SCREEN, refusals=result.refusals), _Stage.TIMING
            return None
        self._stage = _Stage.DONE
        return result

    def hold(
        self,
        final: Final,
        seconds: float,
        refresh: Callable[[], None],
        earlier: Callable[[FinalResult], None],
        device: Device | None = None,
    ) -> FinalResult:
        """The result of a final, over as many tries as it takes, each of at most `seconds`. No candidate is on the
        board.

        `device`: whose worker holds it where the referee has none; None: the first board's. `earlier` gets the peers'
        first times if they come only now. Raises `SearchError` if the final cannot be held."""

        def before(outcome: Outcome) -> None:
            if result := self.take(outcome):
                earlier(result)

        if self._own is None and self._stage is _Stage.WAITING:
            self._own = self._make()
        self._stage = _Stage.DONE if self._stage is _Stage.WAITING else self._stage
        while final.result is None:
            try:
                worker = self._own or (device or self._device).worker
                outcome = worker.ask(final.task, seconds, refresh, before)
            except WorkerFailed:
                if self._own is None:
                    raise
                self._give_up_own()
                continue
            try:
                final.take(outcome)
            except FinalFailed as error:
                raise SearchError(
                    f"The final could not be held: {error} All trials are recorded; `--resume` holds it again."
                ) from None
        return final.result

    def _give_up_own(self) -> None:
        if self._own:
            self._own.stop()
        self._own, self._make = None, lambda: None
        if self._stage is _Stage.PREPARING:
            self._stage = _Stage.TIMING

    def stop(self) -> None:
        """End its own worker, if it has one."""
        for worker in self.workers:
            worker.stop()
