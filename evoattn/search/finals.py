"""Who takes part in a final, its tries until all who are left have a time, and what compute-sanitizer says of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from evoattn.backends.compiler import compile_candidate
from evoattn.correctness import sanitizer
from evoattn.evaluation.workers import Ending, Outcome
from evoattn.families import registry
from evoattn.families.built import BuiltKernel
from evoattn.families.render import render
from evoattn.model.errors import FailedRun
from evoattn.model.gpu import GpuSpec
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, Study, Timing, Trial
from evoattn.model.space import ConfigError, KernelConfig, SearchSpace
from evoattn.samplers.base import STARTING
from evoattn.storage import Storage
from evoattn.timing.contest import Finalists, FinalResult
from evoattn.timing.peers.table import PEERS

FINALISTS = 8
TRIES = 3
"""A GPU worker that died in a final, where no new candidate runs, may have been killed from outside: that costs another try …"""
DEATHS = 2
"""… and so many deaths at one contestant's turn cost that contestant its place."""


class FinalFailed(FailedRun):
    """A final cannot be held: its message is one sentence."""


class Final:
    """One final, over as many tries as it takes: a contestant that breaks, kills or hangs the GPU worker is out of the next."""

    def __init__(self, finalists: Finalists) -> None:
        self._finalists = finalists
        self._timings: dict[str, Timing] = {}
        self._refusals: dict[str, str] = {}
        self._deaths: Counter[str] = Counter()
        self.result: FinalResult | None = None
        """Once it is over: with everybody who was put out on the way."""

    @property
    def task(self) -> tuple[Finalists, tuple[str, ...]]:
        """(finalists, refused peers) of the next try."""
        return {name: f for name, f in self._finalists.items() if name not in self._timings}, tuple(self._refusals)

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
        known = whose in self._finalists or whose in PEERS
        if known and outcome.ending is Ending.TIMEOUT:  # the try may have been slow before it came to this one's turn
            self._put_out(whose, f"The final was ended at its turn: {outcome.value}", disqualified=False)
        elif known and outcome.ending is Ending.DIED and self._deaths[whose] >= DEATHS:
            self._put_out(whose, f"{outcome.value} So it did {DEATHS} times at this one's turn.", disqualified=True)
        elif outcome.ending is not Ending.DIED or self._deaths.total() >= TRIES:
            raise FinalFailed(str(outcome.value))

    def _put_out(self, whose: str, sentence: str, disqualified: bool) -> None:
        if whose in PEERS:
            self._refusals[whose] = sentence
        else:
            self._timings[whose] = Timing.out(sentence, disqualified)
        self._deaths.clear()


def config_of(trial: Trial, spaces: dict[str, SearchSpace]) -> KernelConfig | None:
    """The trial's config if it is one of today's space: a database may hold those of another version, or anything."""
    try:
        return spaces[trial.family].make_config(trial.config)
    except (KeyError, ConfigError):
        return None


def render_again(trial: Trial, config: KernelConfig, problem: AttentionProblem, gpu: GpuSpec) -> Candidate:
    """What today's template makes of a recorded trial."""
    return render(registry.lookup(trial.family), problem, config, gpu)


def choose(
    storage: Storage, study: Study, problem: AttentionProblem, gpu: GpuSpec, spaces: dict[str, SearchSpace]
) -> Finalists:
    """By the trial's number, the best `FINALISTS` candidates, and the best starting config if it is none of them: so what the search
    gained over it is measured in one run.

    Who is not rendered today as it was recorded is passed over. Raises `StorageError`.
    """
    finalists: Finalists = {}

    def takes_part(trial: Trial) -> bool:
        if str(trial.number) in finalists:
            return True
        if (config := config_of(trial, spaces)) is None:
            return False
        candidate = render_again(trial, config, problem, gpu)
        if (
            candidate.source_hash != trial.source_hash
        ):  # of another version, or of whoever wrote the database: not ours to run
            return False
        family, compiled = registry.lookup(trial.family), compile_candidate(candidate)
        finalists[str(trial.number)] = BuiltKernel(family, config, gpu, compiled)
        return True

    for trial in storage.leaderboard(study, FINALISTS, finalists_first=False):
        takes_part(trial)
    for trial in storage.leaderboard(study, FINALISTS, finalists_first=False, operator=STARTING):
        if takes_part(trial):
            break
    return finalists


def sanitize(
    problem: AttentionProblem, finalists: Finalists, timings: dict[str, Timing], refresh: Callable[[], None]
) -> None:
    """compute-sanitizer's verdicts into the finalists' timings; who reads or writes out of bounds is disqualified."""
    for name, kernel in finalists.items():
        if not timings[name].samples_us:
            continue
        refresh()
        verdicts = sanitizer.sanitize(problem, kernel)
        timings[name].protocol["sanitizer"] = verdicts
        if sanitizer.is_damning(verdicts, kernel.compiled):
            said = "; ".join(f"{tool} {sentence}" for tool, sentence in verdicts.items())
            timings[name].protocol.setdefault("disqualified", f"By compute-sanitizer: {said}")
