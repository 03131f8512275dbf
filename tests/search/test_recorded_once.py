"""What a search records: nothing twice, nothing more than was asked for, and what cannot be with its reason."""

import itertools
import math
import sys
import threading
import time
from dataclasses import replace

import pytest

from evoattn.engine.budget import Budget
from evoattn.engine.candidates import Pending
from evoattn.engine.progress import Progress
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.fleet.base import LocalFleet
from evoattn.model.records import CompressedSource, Evaluation, Proposal, TrialState
from evoattn.model.space import KernelConfig
from evoattn.search.recorder import GATHER_SECONDS, Recorder
from evoattn.search.request import SearchPlan
from evoattn.search.study import Search
from evoattn.storage.errors import StorageError
from tests.search.studies_of_fakes import GPU, PROBLEM, Scripted, fakes, make_search, space_of, why_invalid


def alike(space, count):
    """Proposals of valid configs that launch alike."""
    names = space.names()
    points = (dict(zip(names, v, strict=True)) for v in itertools.product(*(p.values for p in space.parameters)))
    found = {}
    for params in (p for p in points if not why_invalid("flash_mma", p)):
        launches = FAMILIES["flash_mma"].launches(PROBLEM, KernelConfig("flash_mma", params), GPU)
        found.setdefault(launches, []).append(Proposal("flash_mma", params))
        if len(found[launches]) == count:
            return found[launches]
    raise ValueError("too few")


def render_one(*words):
    return replace(render(*words), source="one and the same")


@pytest.mark.slow
@pytest.mark.parametrize("offline", [True, False])
def test_what_renders_and_launches_alike_is_evaluated_once_and_a_resumed_search_knows_it(storage, offline):
    spaces = space_of(BLOCK_M="64", BLOCK_N="64", WARPS="4", STAGES="1", KEY_WARPS="1")
    tools = replace(fakes(), render=render_one)
    study = storage.create_study("fake", PROBLEM, GPU, offline, "random", 0, ("flash_mma",), {}, {})
    proposals = alike(spaces["flash_mma"], 6)
    for part in (proposals[:4], proposals[4:]):
        running = Search(
            storage, study, SearchPlan(PROBLEM, GPU, None, spaces), Scripted(*part), LocalFleet(2), tools=tools
        )
        running.run(Budget(trials=99))
        assert running.exhausted and running.progress.recorded == len(part)
    trials = list(storage.iter_trials(study))
    (right,) = [t for t in trials if t.state in (TrialState.ESTIMATED, TrialState.COMPLETE)]
    assert [t.state for t in trials].count(TrialState.DUPLICATE) == 5 and right.number <= 4
    as_it = f"It renders the same source and launches it as trial {right.number} does."
    on_its_way = "It renders the same source and launches it as a candidate still on its way does."
    assert {t.reason for t in trials[:4]} <= {"", "Never timed.", as_it, on_its_way}
    assert {t.reason for t in trials[4:]} == {as_it}


@pytest.mark.slow
def test_what_cannot_be_is_recorded_and_told_and_costs_nothing_more(storage):
    space = load_space("flash_mma", GPU)
    right = next(c for c in space.starting_configs() if not why_invalid("flash_mma", c.params))
    wrong = next(w for w in range(2, 9) if w in (2, 8) and why_invalid("flash_mma", right.params | {"WARPS": w}))
    proposals = [
        Proposal("flash_mma", right.params | {"WARPS": wrong}, (), "made up"),
        Proposal("flash_mma", right.params),
    ]
    sampler = Scripted(*proposals)
    study = storage.create_study("fake", PROBLEM, GPU, True, "random", 0, ("flash_mma",), {}, {})
    running = Search(
        storage, study, SearchPlan(PROBLEM, GPU, None, {"flash_mma": space}), sampler, LocalFleet(1), tools=fakes()
    )
    progress = running.run(Budget(trials=9))
    trials = list(storage.iter_trials(study))
    assert [t.state for t in trials] == [TrialState.INVALID_CONFIG, TrialState.ESTIMATED]
    assert trials[0].reason and trials[0].source_hash is None and trials[0].operator == "made up"
    assert progress.recorded == 2 and progress.measured == 1 and running.exhausted
    assert [(p, t.number) for p, t in sampler.told] == list(zip(proposals, (1, 2), strict=True))


@pytest.mark.slow
def test_a_finished_search_is_not_overrun_and_repeats_nothing(storage):
    """Starting again on the same records: the sampler forgot nothing, the table of what ran holds every trial."""

    def run(trials):
        running = make_search(storage, space_of(WARPS="4"), fakes(), jobs=2, offline=True)
        running.run(Budget(trials=trials))
        return running

    run(5)
    again = run(4)
    trials = list(storage.iter_trials(again.study))
    assert len(trials) == 9 == len({t.config_id for t in trials})
    assert {t.state for t in trials} == {TrialState.ESTIMATED}


def test_results_that_come_at_once_share_a_transaction_and_are_told_after_it(storage):
    study = storage.create_study("fake", PROBLEM, GPU, True, "random", 0, ("flash_mma",), {}, {})
    proposals = alike(load_space("flash_mma", GPU), 3)
    sampler, progress, then = Scripted(), Progress(), []
    batches = []

    class Counting:
        def record_all(self, study, new):
            assert not sampler.told
            batches.append(len(new))
            return storage.record_all(study, new)

    recorder = Recorder(Counting(), study, sampler, progress)
    for cost, proposal in enumerate(proposals, 5):
        config = KernelConfig("flash_mma", proposal.params)
        candidate = render(FAMILIES["flash_mma"], PROBLEM, config, GPU)
        source = CompressedSource.of(candidate)
        pending = Pending(proposal, FAMILIES["flash_mma"], config, PROBLEM, GPU, source, source.hash)
        recorder.record_pending(pending, Evaluation(TrialState.ESTIMATED, relative_cost=cost), then.append)
    assert recorder.waiting == 3 and not progress.recorded and not list(storage.iter_trials(study))
    recorder.flush()
    recorder.flush(wait=True)
    recorder.stop()
    assert batches == [3] and recorder.waiting == 0 and progress.recorded == 3
    trials = list(storage.iter_trials(study))
    assert [t.number for t in then] == [t.number for t in trials] == [t.number for _, t in sampler.told]
    assert [p for p, _ in sampler.told] == proposals and [t.relative_cost for t in trials] == [5, 6, 7]
    assert [storage.source(t.source_hash) for t in trials] and progress.best.number == trials[0].number
    assert recorder.seen.earlier(trials[1].source_hash) == f"trial {trials[1].number}"


class Slow:
    """A storage that writes when it is let, or fails."""

    def __init__(self, storage, error=None):
        self.let, self._storage, self._error = threading.Event(), storage, error

    def record_all(self, study, new):
        assert self.let.wait(200)
        if self._error:
            raise self._error
        return self._storage.record_all(study, new)


def recorder_of(slow, storage, progress):
    """A recorder, and a call that hands it one more result."""
    study = storage.create_study("fake", PROBLEM, GPU, True, "random", 0, ("flash_mma",), {}, {})
    proposals = iter(alike(load_space("flash_mma", GPU), 5))
    recorder = Recorder(slow, study, Scripted(), progress)

    def record():
        proposal = next(proposals)
        config = KernelConfig("flash_mma", proposal.params)
        recorder.record(proposal, config, Evaluation(TrialState.INVALID_CONFIG, "No."))

    return recorder, record


def test_nobody_waits_for_the_disk_and_what_came_meanwhile_is_written_next(storage):
    slow, progress = Slow(storage), Progress()
    recorder, record = recorder_of(slow, storage, progress)
    for waiting in (1, 2, 3):
        record()
        recorder.flush()
        assert recorder.waiting == waiting and not progress.recorded
    slow.let.set()
    recorder.flush(wait=True)
    recorder.stop()
    assert recorder.waiting == 0 and progress.recorded == 3


def test_results_gather_for_a_while_before_the_next_transaction(storage):
    slow, progress = Slow(storage), Progress()
    recorder, record = recorder_of(slow, storage, progress)
    slow.let.set()
    begun = time.monotonic()
    assert recorder.due == math.inf
    record()
    assert recorder.due == 0.0
    recorder.flush()
    record()
    while progress.recorded < 2:
        assert 0.0 <= recorder.due <= GATHER_SECONDS
        recorder.flush()
    assert GATHER_SECONDS <= time.monotonic() - begun < 200 * GATHER_SECONDS
    record()
    recorder.flush(wait=True)
    assert progress.recorded == 3, "who waits for it is not kept"
    recorder.stop()


@pytest.mark.parametrize("known", ["when it is waited for", "when the search is stopped"])
def test_a_database_that_fails_ends_the_search(storage, known):
    slow = Slow(storage, StorageError("The disk is full."))
    recorder, record = recorder_of(slow, storage, Progress())
    record()
    recorder.flush()
    slow.let.set()
    with pytest.raises(StorageError, match=r"The disk is full\."):
        recorder.flush(wait=True) if known == "when it is waited for" else recorder.stop()
    recorder.stop()


def test_what_waits_is_written_when_a_search_is_stopped(storage):
    slow, progress = Slow(storage), Progress()
    recorder, record = recorder_of(slow, storage, progress)
    for _ in range(2):
        record()
        recorder.flush()
    slow.let.set()
    recorder.stop()
    assert recorder.waiting == 0 and progress.recorded == 2


def test_how_often_threads_take_turns_is_as_it_was_after_a_search(storage):
    before = sys.getswitchinterval()
    recorder, record = recorder_of(storage, storage, Progress())
    assert sys.getswitchinterval() == before
    record()
    recorder.flush()
    assert sys.getswitchinterval() < before
    recorder.stop()
    assert sys.getswitchinterval() == pytest.approx(before)
