"""A final over as many tries as it takes until all who are left have a time."""

from collections import Counter
from collections.abc import Collection, Mapping

from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import HoldFinal, OnProblem
from evoattn.evaluation.workers import Outcome
from evoattn.model.errors import FailedRun
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Timing
from evoattn.peers.labels import PEER_NAMES
from evoattn.timing.protocol import FINAL, Finalists, FinalResult, Protocol

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
