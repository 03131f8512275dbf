"""What goes into the database comes out of it, in the order that it should."""

from __future__ import annotations

import math
import sqlite3
import time
from dataclasses import replace

import pytest
from storage_records import INFO, PROBLEM, make_study, record, timing

from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CheckResult, Evaluation, Timing, TrialState, ValidationReport
from evoattn.model.space import KernelConfig
from evoattn.storage import Storage, StorageError, UnknownRecord
from evoattn.storage.chosen import chosen_trial


def test_records_come_back_as_they_went_in(storage, path):
    study = make_study(storage)
    trial = record(
        storage, study, 64, timings=(timing("screen", 21.5, 22.5), timing("repeat", 21.0)), relative_cost=3.5
    )
    bare = storage.record(
        study, KernelConfig("flash_mma", {"BLOCK_M": 1}), None, Evaluation(TrialState.INVALID_CONFIG, "Too small.")
    )
    storage.close()
    again = Storage.open(f"sqlite:///{path}", create=False)
    assert (
        again.studies() == [study] == [again.find_study("first")] == [again.study(study.id)]
        and again.latest_study() == study
    )
    assert again.find_study("second") is None and again.chosen_study("first") == again.chosen_study(None) == study
    assert again.trial(trial.number) == trial and again.trial(bare.number) == bare
    assert again.source(trial.source_hash) == "constexpr int BLOCK_M = 64; // µs"
    assert list(again.iter_trials(study, evidence=True)) == [trial, bare]
    assert list(again.iter_trials(study)) == [replace(trial, compile_info=None, validation=None), bare]
    assert AttentionProblem(**study.problem) == PROBLEM
    again.close()


def test_a_nan_error_is_kept_as_json_that_others_can_read(storage, path):
    study = make_study(storage)
    report = ValidationReport("cuda", (CheckResult("large logits", False, math.nan, 1e-2, "NaN."),))
    evaluation = Evaluation(TrialState.WRONG_RESULT, "NaN.", INFO, report)
    trial = storage.record(study, KernelConfig("flash_mma", {"BLOCK_M": 1}), None, evaluation)
    assert math.isnan(storage.trial(trial.number).validation.checks[0].max_error)
    with sqlite3.connect(path) as plain:
        assert plain.execute("SELECT json_extract(validation, '$.checks[0].max_error') FROM trials").fetchone() == (
            "nan",
        )


def test_trial_numbers_are_unique_in_the_database_and_sources_kept_once(storage, path):
    first, second = make_study(storage), make_study(storage, "second")
    numbers = [record(storage, study, i, source="same").number for i in range(3) for study in (first, second)]
    assert len(set(numbers)) == 6 and len(list(storage.iter_trials(second))) == 3
    with sqlite3.connect(path) as plain:
        assert plain.execute("SELECT count(*) FROM sources").fetchone() == (1,)


def test_measured_trials_rank_by_their_most_trusted_stage(storage):
    study = make_study(storage)
    lucky = record(storage, study, 1, timings=(timing("screen", 10.0), timing("repeat", 30.0)))
    steady = record(storage, study, 2, timings=(timing("screen", 20.0), timing("repeat", 21.0)))
    screened = record(storage, study, 3, timings=(timing("screen", 25.0),))
    record(storage, study, 4, state=TrialState.IMPLAUSIBLE, timings=(timing("screen", 0.1),))
    record(storage, study, 5, state=TrialState.ESTIMATED, relative_cost=0.1)
    assert [t.number for t in storage.leaderboard(study, 9)] == [steady.number, screened.number, lucky.number]
    storage.add_timing(lucky.number, timing("final", 19.0, 20.0, 18.0))
    storage.add_timing(steady.number, timing("final", 22.0))
    storage.add_timing(steady.number, timing("final", 18.5))  # a later final of the same trial counts
    leaders = storage.leaderboard(study, 2)
    assert [(t.number, t.timing.median_us) for t in leaders] == [(steady.number, 18.5), (lucky.number, 19.0)]
    assert [t.protocol["stage"] for t in leaders[1].timings] == ["screen", "repeat", "final"]


def test_finalists_stand_before_a_lucky_sample_taken_alone(storage):
    study = make_study(storage)
    lucky, slow, fast = (
        record(storage, study, i, timings=(timing("screen", us),)) for i, us in enumerate((9.0, 10.0, 11.0))
    )
    earlier, latest = (Timing((12.0,), {"stage": "final", "run": run}) for run in ("first", "second"))
    storage.add_timing(slow.number, earlier)
    assert [t.number for t in storage.leaderboard(study, 9)] == [slow.number, lucky.number, fast.number]
    storage.add_timing(fast.number, latest)
    assert [t.number for t in storage.leaderboard(study, 9)] == [fast.number, lucky.number, slow.number]
    assert [t.number for t in storage.leaderboard(study, 9, finalists_first=False)] == [
        lucky.number,
        slow.number,
        fast.number,
    ]


def test_offline_trials_rank_by_relative_cost(storage):
    study = make_study(storage, offline=True)
    numbers = [
        record(storage, study, i, TrialState.ESTIMATED, relative_cost=cost).number
        for i, cost in enumerate((3.0, 1.0, 2.0))
    ]
    record(storage, study, 9, TrialState.WRONG_RESULT, relative_cost=0.5)
    assert [t.number for t in storage.leaderboard(study, 2)] == [numbers[1], numbers[2]]


def test_failures_are_counted_by_state_and_reason(storage):
    study = make_study(storage)
    for i, (state, reason) in enumerate(
        [(TrialState.WRONG_RESULT, "a"), (TrialState.WRONG_RESULT, "a"), (TrialState.TIMEOUT, "b")]
    ):
        record(storage, study, i, state, reason=reason)
    record(storage, study, 9, timings=(timing("screen", 1.0),))
    assert storage.failures(study) == [(TrialState.WRONG_RESULT, "a", 2), (TrialState.TIMEOUT, "b", 1)]
    assert storage.failures(study, limit=1) == [(TrialState.WRONG_RESULT, "a", 2)]
    assert storage.counts(study) == {TrialState.COMPLETE: 1, TrialState.TIMEOUT: 1, TrialState.WRONG_RESULT: 2}


def test_baselines_keep_timings_and_refusals_apart(storage):
    study, other = make_study(storage), make_study(storage, "other")
    storage.add_peer(study, "sdpa:flash", timing("screen", 21.0))
    storage.add_peer(study, "sdpa:flash", timing("final", 20.0, 20.5))
    storage.add_peer(study, "sdpa:cudnn", None, "It takes no fp32.")
    assert storage.peers(study) == {"sdpa:flash": [timing("screen", 21.0), timing("final", 20.0, 20.5)]}
    assert storage.refusals(study) == {"sdpa:cudnn": "It takes no fp32."}
    assert storage.peers(other) == storage.refusals(other) == {}


def test_unknown_records_are_sentences(storage):
    with pytest.raises(UnknownRecord, match=r"There is no trial 99 in .*evoattn\.sqlite; "):
        storage.trial(99)
    with pytest.raises(UnknownRecord, match="There is no study 99"):
        storage.study(99)
    make_study(storage)
    with pytest.raises(StorageError, match=r"The study 'first' is there already; .*--resume"):
        make_study(storage)


@pytest.mark.slow
def test_a_large_study_is_written_and_read_quickly(storage):
    """2000 trials here; 20 000 take ten times as long to record and to read one by one, and a report has 3 s for
    that."""
    study = make_study(storage)
    started = time.perf_counter()
    for i in range(2000):
        state = TrialState.COMPLETE if i % 2 else TrialState.WRONG_RESULT
        timings = (timing("screen", *[20.0 + i] * 5),)
        record(storage, study, i, state, timings, reason=f"case {i % 100}", source=f"{i}" + "// a line\n" * 500)
    written = time.perf_counter()
    assert [t.config["BLOCK_M"] for t in storage.leaderboard(study, 10)] == list(range(1, 20, 2))
    assert len(storage.failures(study, 10_000)) == 50 and sum(storage.counts(study).values()) == 2000
    queried = time.perf_counter()
    assert sum(1 for _ in storage.iter_trials(study)) == 2000
    read = time.perf_counter()
    assert written - started < 30 and queried - written < 0.5 and read - queried < 1.0


def test_a_study_without_a_right_trial_has_no_best(storage):
    study = make_study(storage)
    record(storage, study, 1, TrialState.WRONG_RESULT, reason="It differs.")
    with pytest.raises(UnknownRecord, match="no best trial yet: study first has none"):
        chosen_trial(storage, "best")
    best = record(storage, study, 2, timings=(timing("screen", 2.0),))
    record(storage, study, 3, timings=(timing("screen", 3.0),))
    assert chosen_trial(storage, "best").number == best.number and chosen_trial(storage, "1").number == 1
    for word in ("first", "-1", "²", "1" * 13):
        with pytest.raises(UnknownRecord, match="is not the number of a trial"):
            chosen_trial(storage, word)
