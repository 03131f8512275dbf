"""The loop on workers that misbehave: a death, a hang or a failed compile costs its candidate and no more."""

import pytest

from evoattn.engine.budget import Budget
from evoattn.engine.loop import EARLY
from evoattn.engine.progress import Progress
from evoattn.families.registry import load_space
from evoattn.model.records import TrialState
from tests.search.search_fakes import AlwaysDoubtsItself, DoubtsItself, SlowToStart, WaitsForAFile, cost
from tests.search.studies_of_fakes import GPU, fakes, make_search, space_of


@pytest.mark.slow
def test_misbehaving_workers_cost_their_candidates_only(storage):
    spaces = {"flash_mma": load_space("flash_mma", GPU)}
    running = make_search(storage, spaces, fakes(compile_seconds=3.0, device_seconds=3.0), jobs=3)
    study = running.study
    progress = running.run(Budget(trials=34))
    counts = storage.counts(study)
    assert progress.recorded == 34 == sum(counts.values())
    assert set(counts) == {
        TrialState.COMPLETE,
        TrialState.COMPILE_ERROR,
        TrialState.LAUNCH_ERROR,
        TrialState.WORKER_DIED,
        TrialState.TIMEOUT,
    }
    fates = {
        TrialState.COMPILE_ERROR: lambda c: c["WARPS"] == 6,
        TrialState.WORKER_DIED: lambda c: c["STAGES"] == 3,
        TrialState.LAUNCH_ERROR: lambda c: c["KEY_WARPS"] == 2,
        TrialState.TIMEOUT: lambda c: c["WARPS"] == 3 or (c["STAGES"] == 4 and c["BLOCK_N"] < 64),
    }
    for trial in storage.iter_trials(study):
        if trial.state in fates:
            assert fates[trial.state](trial.config) and trial.reason, trial
        else:
            assert trial.state is TrialState.COMPLETE and trial.relative_cost == cost(trial.config)
    best = storage.leaderboard(study, 1)[0]
    assert best.timing.protocol["stage"] == "final"
    assert best.timing.median_us == min(t.timing.median_us for t in storage.iter_trials(study) if t.timing)
    assert storage.peers(study)["flash"][-1].interleaved_with(best.timing) and "cudnn" in storage.refusals(study)
    assert progress.best.number == best.number and progress.best_value == best.timing.median_us
    assert progress.peers == {"flash": 30.0} and progress.ratio == best.timing.median_us / 30.0
    seconds, values = zip(*progress.improvements, strict=True)
    assert list(seconds) == sorted(seconds) and list(values) == sorted(values, reverse=True)
    assert values[-1] == best.timing.median_us and 0 < progress.since_improvement <= progress.seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    "device, state", [(DoubtsItself, TrialState.COMPLETE), (AlwaysDoubtsItself, TrialState.WRONG_RESULT)]
)
def test_a_doubtful_verdict_is_asked_for_again_once(storage, device, state):
    """A process that a kernel may have harmed gives no verdict on the next one."""
    running = make_search(storage, space_of(WARPS="4", STAGES="1", KEY_WARPS="1"), fakes(device))
    running.run(Budget(trials=2))
    trials = list(storage.iter_trials(running.study))
    assert [t.state for t in trials] == [state] * 2
    assert {t.reason for t in trials} == ({""} if state is TrialState.COMPLETE else {"Verdict 2."})


@pytest.mark.slow
def test_a_small_budget_counts_from_when_the_workers_are_up(storage):
    running = make_search(storage, space_of(WARPS="4", STAGES="1,2", KEY_WARPS="1"), fakes(SlowToStart))
    stages = set()
    progress = running.run(
        Budget(seconds=0.8), lambda: stages.add((running.progress.stage, running.progress.started is None))
    )
    # What a busy machine measures in this time is not asked here.
    assert progress.starting_seconds > 1.0 and progress.seconds > 0.4 and progress.busy_share < 1.2
    assert {("starting workers", True), ("searching", False)} <= stages


@pytest.mark.slow
def test_few_candidates_are_compiled_before_a_device_can_take_them(storage, tmp_path, monkeypatch):
    start = tmp_path / "start"
    monkeypatch.setenv("START", str(start))
    running = make_search(storage, space_of(WARPS="4", KEY_WARPS="1"), fakes(WaitsForAFile), jobs=8)
    before = []

    def watch():
        if running.progress.started is None:
            before.append(running.progress.compiling + running.progress.ready)
            if before.count(EARLY) >= 10 or len(before) > 3000:
                start.touch()

    assert running.run(Budget(trials=20), watch).recorded >= 20 and max(before) == EARLY


def test_what_no_worker_ever_judged_is_not_measured():
    progress = Progress(recorded=3)
    progress.states.update([TrialState.INVALID_CONFIG, TrialState.DUPLICATE, TrialState.COMPILE_ERROR])
    assert (
        not progress.measured
        and not progress.seconds
        and not progress.busy_share
        and not progress.candidates_per_second
    )
