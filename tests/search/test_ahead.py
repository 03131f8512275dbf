"""A sampler in a process of its own."""

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from evoattn.engine.budget import Budget
from evoattn.engine.tools import SearchError
from evoattn.evaluation.process import Ending
from evoattn.evaluation.workers import Outcome, wait_for_any
from evoattn.fleet.base import LocalFleet
from evoattn.model.records import Proposal, TrialState
from evoattn.samplers.base import SamplerSetup
from evoattn.samplers.registry import make_sampler
from evoattn.search import ahead
from evoattn.search.ahead import AHEAD, FIRST, AheadSampler, Proposed, has_more, listen, provide_for, stop, worker_of
from evoattn.search.request import SearchPlan
from evoattn.search.study import Search
from tests.search.search_fakes import cost
from tests.search.studies_of_fakes import GPU, PROBLEM, fakes, make_search, space_of, why_invalid

SMALL = {
    "WARPS": "4",
    "STAGES": "1",
    "KEY_WARPS": "1",
    "BLOCK_N": "64",
    "RESCALE": "always",
    "O_STORE": "direct",
    "ROW_SUM": "mma",
}
"""Values of genes that leave 120 configs."""


def make_random(spaces):
    return make_sampler("random", SamplerSetup(spaces, 0, why_invalid))


class Echo:
    """Proposes the number of results that it was told of; none once it was restored from a trial."""

    def __init__(self):
        self.told, self.restored, self.rejected = 0, 0, Counter(never=1)

    def ask(self, n):
        return [] if self.restored else [Proposal("flash_mma", {"told": self.told})] * n

    def tell(self, proposal, trial):
        self.told += 1
        assert trial.validation is None and trial.config_id

    def restore(self, trials):
        self.restored += len(tuple(trials))


class Raises(Echo):
    def ask(self, n):
        raise ValueError("No idea.")


@pytest.fixture
def start():
    started = []

    def begin(*words):
        started.append(AheadSampler.start(*words))
        return started[-1]

    yield begin
    for sampler in started:
        stop(sampler)


def hear(sampler, seconds):
    listen(sampler, wait_for_any(worker_of(sampler), seconds))


def asked(sampler, count):
    """That many proposals, waited for."""
    taken = []
    while len(taken) < count and has_more(sampler):
        taken += sampler.ask(count - len(taken))
        if len(taken) < count:
            hear(sampler, 5)
    return taken


def trial_of(storage):
    """One of a search."""
    make_search(storage, space_of(**SMALL), fakes(), offline=True).run(Budget(trials=1))
    return next(iter(storage.iter_trials(storage.find_study("fake"))))


@pytest.mark.slow
def test_it_proposes_what_the_sampler_would_and_has_some_before_they_are_wanted(start):
    spaces = space_of(WARPS="4", STAGES="1")
    sampler = start(make_random, spaces)
    assert sampler.ask(5) == [] and has_more(sampler), "its process has not started"
    taken = asked(sampler, 3 * AHEAD)
    assert taken == make_random(spaces).ask(3 * AHEAD)
    while not sampler.ask(1):
        hear(sampler, 5)
    assert not has_more(make_random(spaces)) and worker_of(make_random(spaces)) == []


class AnswersAtOnce:
    """A worker that keeps how many proposals it was asked for."""

    def __init__(self):
        self.counts, self.ready, self.idle, self._outcome = [], True, True, None

    def submit(self, tag, task, seconds):
        self.counts.append(task.count)
        proposed = Proposed([Proposal("flash_mma", {})] * task.count)
        self._outcome = Outcome(tag, Ending.RESULT, proposed, 0.0)

    def poll(self):
        outcome, self._outcome = self._outcome, None
        return outcome


def test_the_first_answer_waits_for_few_thoughts():
    worker = AnswersAtOnce()
    sampler = AheadSampler(worker)
    assert worker_of(sampler) == [worker]
    listen(sampler, [])
    assert not worker.counts, "it was not among those that were heard"
    listen(sampler, [worker])
    assert worker.counts == [FIRST], "it thinks before it is asked"
    taken: list[Proposal] = []
    while len(taken) < 3 * AHEAD:
        taken += sampler.ask(3 * AHEAD - len(taken))
    assert worker.counts[0] == FIRST < AHEAD == worker.counts[1]


@pytest.mark.slow
def test_it_hears_of_results_before_it_thinks_again(start, storage):
    sampler, trial = start(Echo), trial_of(storage)
    first = asked(sampler, 1)[0]
    for _ in range(3):
        sampler.tell(first, trial)
    later = asked(sampler, 3 * AHEAD)
    assert first.params == {"told": 0} and later[-1].params == {"told": 3}


@pytest.mark.slow
def test_it_is_restored_and_says_when_nothing_is_left(start, storage):
    sampler = start(Echo)
    sampler.restore([trial_of(storage)])
    assert asked(sampler, 1) == [] and not has_more(sampler) and sampler.rejected == Counter(never=1)


@pytest.mark.slow
def test_a_search_ends_when_its_space_is_used_up(start, storage):
    spaces = space_of(**SMALL)
    study = storage.create_study("ahead", PROBLEM, GPU, False, "random", 0, tuple(spaces), {}, {})
    sampler = start(make_random, spaces)
    running = Search(storage, study, SearchPlan(PROBLEM, GPU, None, spaces), sampler, LocalFleet(2), tools=fakes())
    running.run(Budget(trials=9999))
    trials = list(storage.iter_trials(study))
    everything = make_random(spaces).ask(9999)
    assert running.exhausted and len(trials) == len(everything) > AHEAD
    best = min(t.timing.median_us for t in trials if t.state is TrialState.COMPLETE)
    assert best == min(cost(p.params) for p in everything)


@pytest.mark.slow
def test_a_sampler_that_fails_ends_the_search_with_a_sentence(start):
    with pytest.raises(SearchError, match=r"^The sampler cannot go on: ValueError: No idea\.$"):
        asked(start(Raises), 1)


@pytest.mark.slow
@pytest.mark.parametrize("busy", [True, False])
def test_the_death_of_the_sampler_ends_the_search_with_a_sentence(start, busy):
    sampler = start(Echo)
    asked(sampler, 1)
    while sampler.worker.busy != busy:
        hear(sampler, 0.01)
        sampler.ask(int(busy))
    os.kill(sampler.worker.pid, signal.SIGKILL)
    with pytest.raises(SearchError, match=r"^The sampler cannot go on: .*ended"):
        asked(sampler, 5 * AHEAD)


@pytest.mark.slow
def test_its_process_waits_for_none_of_the_slow_imports():
    code = (
        "import sys, evoattn.search.ahead, evoattn.samplers.for_problem, evoattn.samplers.guided, evoattn.cost.cost\n"
        "slow = 'torch', 'cupy', 'sqlalchemy', 'alembic', 'optuna', 'sklearn', 'typer'\n"
        "print([name for name in slow if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_its_process_needs_no_torch(monkeypatch):
    asked: list[object] = []
    monkeypatch.setattr(ahead, "Worker", lambda *words, **more: asked.append((words, more)))
    AheadSampler.start(make_random, 3)
    assert asked == [((ahead.Thinking, (make_random, 3)), {"beside": True})]


def test_who_thinks_ahead_does_so_for_each_board():
    plain, sampler = make_random(space_of(**SMALL)), object.__new__(AheadSampler)
    for boards, factor in ((0, 1), (1, 1), (3, 3)):
        provide_for(plain, boards)
        provide_for(sampler, boards)
        assert sampler.ahead == factor * AHEAD and not hasattr(plain, "ahead") and not has_more(plain)
