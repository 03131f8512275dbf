"""What goes into the database comes out of it, in the order that it should."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from sqlalchemy import Engine, event, text

from evoattn.model import gpu
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CheckResult, Evaluation, Study, Timing, TrialState, ValidationReport
from evoattn.model.shape_text import named_problems
from evoattn.model.space import KernelConfig
from evoattn.storage import Storage, StorageError, UnknownRecord
from evoattn.storage.storage import chosen_trial
from tests.storage.storage_records import INFO, PROBLEM, make_study, record, timing


def test_records_come_back_as_they_went_in(either, url, plain):
    study = make_study(either)
    trial = record(either, study, 64, timings=(timing("screen", 21.5, 22.5), timing("repeat", 21.0)), relative_cost=3.5)
    bare = either.record(
        study, KernelConfig("flash_mma", {"BLOCK_M": 1}), None, Evaluation(TrialState.INVALID_CONFIG, "Too small.")
    )
    unsaid = " AND ".join(f"{column} IS NULL" for column in ("compile_options", "compile_warnings", "validation"))
    assert either._read(lambda c: c.scalar(text(f"SELECT number FROM trials WHERE {unsaid}"))) == bare.number
    either.close()
    again = Storage.open(url, create=False)
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


def test_a_study_of_any_named_problem_comes_back(either):
    """Scales and caps are numbers with a fraction."""
    facts = gpu.lookup("h100"), True, "genetic", 0, ("flash_wgmma",), {}, {}
    for name, problem in named_problems().items():
        scaled = problem.with_(scale=problem.scale or 0.3)
        study = either.create_study(name, scaled, *facts)
        assert either.find_study(name) == study and AttentionProblem(**study.problem).scale == scaled.scale, name


def test_a_name_that_no_study_has(either):
    facts = PROBLEM, gpu.lookup("h100"), True, "genetic", 0, ("flash_wgmma",), {}, {}
    given = [either.create_study(either.free_name("stem"), *facts).name for _ in range(3)]
    assert given == ["stem", "stem_2", "stem_3"]
    either.create_study("stem_5", *facts)
    assert either.free_name("stem") == "stem_4" and either.free_name("other") == "other"


def test_searches_that_begin_at_once_get_names_of_their_own(either, url):
    """Each has seen the same free name before the other has taken it."""
    other = Storage.open(url)

    def create(name: str) -> Study:
        if len(either.study_names()) < 3:
            make_study(other, name)
        return make_study(either, name)

    assert either.create_numbered("stem", create).name == "stem_4"
    assert either.study_names() == ["stem", "stem_2", "stem_3", "stem_4"]
    other.close()


def test_a_refusal_that_no_other_name_mends_is_raised(either):
    make_study(either)
    with pytest.raises(StorageError, match="'first' is there already"):
        either.create_numbered("stem", lambda name: make_study(either))


def test_a_nan_error_is_kept_as_json_that_others_can_read(either, url, plain):
    study = make_study(either)
    report = ValidationReport("cuda", (CheckResult("large logits", False, math.nan, 1e-2, "NaN."),))
    evaluation = Evaluation(TrialState.WRONG_RESULT, "NaN.", INFO, report)
    trial = either.record(study, KernelConfig("flash_mma", {"BLOCK_M": 1}), None, evaluation)
    assert math.isnan(either.trial(trial.number).validation.checks[0].max_error)
    [(validation,)] = plain("SELECT CAST(validation AS TEXT) FROM trials")
    assert json.loads(validation, parse_constant=pytest.fail)["checks"][0]["max_error"] == "nan"


def test_trial_numbers_are_unique_in_the_database_and_sources_kept_once(either, url, plain):
    first, second = make_study(either), make_study(either, "second")
    numbers = [record(either, study, i, source="same").number for i in range(3) for study in (first, second)]
    assert len(set(numbers)) == 6 and len(list(either.iter_trials(second))) == 3
    assert plain("SELECT count(*) FROM sources") == [(1,)]


def test_measured_trials_rank_by_their_most_trusted_stage(either):
    study = make_study(either)
    lucky = record(either, study, 1, timings=(timing("screen", 10.0), timing("repeat", 30.0)))
    steady = record(either, study, 2, timings=(timing("screen", 20.0), timing("repeat", 21.0)))
    screened = record(either, study, 3, timings=(timing("screen", 25.0),))
    record(either, study, 4, state=TrialState.IMPLAUSIBLE, timings=(timing("screen", 0.1),))
    record(either, study, 5, state=TrialState.ESTIMATED, relative_cost=0.1)
    assert [t.number for t in either.leaderboard(study, 9)] == [steady.number, screened.number, lucky.number]
    either.add_timing(lucky.number, timing("final", 19.0, 20.0, 18.0))
    either.add_timing(steady.number, timing("final", 22.0))
    either.add_timing(steady.number, timing("final", 18.5))  # a later final of the same trial counts
    leaders = either.leaderboard(study, 2)
    assert [(t.number, t.timing.median_us) for t in leaders] == [(steady.number, 18.5), (lucky.number, 19.0)]
    assert [t.protocol["stage"] for t in leaders[1].timings] == ["screen", "repeat", "final"]


def test_finalists_stand_before_a_lucky_sample_taken_alone(either):
    study = make_study(either)
    lucky, slow, fast = (
        record(either, study, i, timings=(timing("screen", us),)) for i, us in enumerate((9.0, 10.0, 11.0))
    )
    earlier, latest = (Timing((12.0,), {"stage": "final", "run": run}) for run in ("first", "second"))
    either.add_timing(slow.number, earlier)
    assert [t.number for t in either.leaderboard(study, 9)] == [slow.number, lucky.number, fast.number]
    either.add_timing(fast.number, latest)
    assert [t.number for t in either.leaderboard(study, 9)] == [fast.number, lucky.number, slow.number]
    assert [t.number for t in either.leaderboard(study, 9, finalists_first=False)] == [
        lucky.number,
        slow.number,
        fast.number,
    ]


def test_offline_trials_rank_by_relative_cost(either):
    study = make_study(either, offline=True)
    numbers = [
        record(either, study, i, TrialState.ESTIMATED, relative_cost=cost).number
        for i, cost in enumerate((3.0, 1.0, 2.0))
    ]
    record(either, study, 9, TrialState.WRONG_RESULT, relative_cost=0.5)
    assert [t.number for t in either.leaderboard(study, 2)] == [numbers[1], numbers[2]]


def test_failures_are_counted_by_state_and_reason(either):
    study = make_study(either)
    for i, (state, reason) in enumerate(
        [(TrialState.WRONG_RESULT, "a"), (TrialState.WRONG_RESULT, "a"), (TrialState.TIMEOUT, "b")]
    ):
        record(either, study, i, state, reason=reason)
    record(either, study, 9, timings=(timing("screen", 1.0),))
    assert either.failures(study) == [(TrialState.WRONG_RESULT, "a", 2), (TrialState.TIMEOUT, "b", 1)]
    assert either.failures(study, limit=1) == [(TrialState.WRONG_RESULT, "a", 2)]
    assert either.counts(study) == {TrialState.COMPLETE: 1, TrialState.TIMEOUT: 1, TrialState.WRONG_RESULT: 2}


def test_baselines_keep_timings_and_refusals_apart(either):
    study, other = make_study(either), make_study(either, "other")
    either.add_peer(study, "sdpa:flash", timing("screen", 21.0))
    either.add_peer(study, "sdpa:flash", timing("final", 20.0, 20.5))
    either.add_peer(study, "sdpa:cudnn", None, "It takes no fp32.")
    assert either.peers(study) == {"sdpa:flash": [timing("screen", 21.0), timing("final", 20.0, 20.5)]}
    assert either.refusals(study) == {"sdpa:cudnn": "It takes no fp32."}
    assert either.peers(other) == either.refusals(other) == {}


@pytest.mark.parametrize("change", [{"seed": "x"}, {"options": {"cache": "hot"}}, {"families": (5,)}])
def test_a_study_that_could_not_be_read_is_not_written(either, change):
    words = dict(name="odd", problem=PROBLEM, gpu=gpu.GPUS["l4"], offline=True, sampler="genetic", seed=7)
    words |= dict(families=("flash_mma",), versions={}, options={"cache": "warm"})
    with pytest.raises(StorageError, match="Study 'odd' is damaged"):
        either.create_study(**(words | change))
    assert either.studies() == []


def test_unknown_records_are_sentences(either):
    with pytest.raises(UnknownRecord, match=r"There is no trial 99 in .*/(evoattn\.sqlite|test\d+); "):
        either.trial(99)
    with pytest.raises(UnknownRecord, match="There is no study 99"):
        either.study(99)
    with pytest.raises(UnknownRecord, match=r"There is no study in .* yet; start with `evoattn search`\."):
        either.chosen_study("first")
    make_study(either)
    with pytest.raises(StorageError, match=r"'first' is there already; .* `evoattn search --resume --study first`"):
        make_study(either)


@pytest.mark.parametrize("name", ["a\0b", "a\udcffb"])
def test_a_name_that_no_driver_can_send_is_of_no_study(either, name):
    make_study(either)
    with pytest.raises(UnknownRecord, match=r"There is no study 'a\\.*b' in .*; it has first\."):
        either.chosen_study(name)


@pytest.mark.slow
def test_questions_about_a_large_study_are_few_statements(either):
    """A report of 20 000 trials may take 3 s: no question of it is asked once for every trial."""
    study, count, asked = make_study(either), 200, []
    for i in range(count):
        state = TrialState.COMPLETE if i % 2 else TrialState.WRONG_RESULT
        timings = (timing("screen", *[20.0 + i] * 5),)
        record(either, study, i, state, timings, reason=f"case {i % 100}", source=f"{i}" + "// a line\n" * 500)
    event.listen(Engine, "before_cursor_execute", note := lambda *given: asked.append(given[2]))
    assert [t.config["BLOCK_M"] for t in either.leaderboard(study, 10)] == list(range(1, 20, 2))
    assert len(either.failures(study, 10_000)) == 50 and sum(either.counts(study).values()) == count
    assert sum(1 for _ in either.iter_trials(study)) == count
    event.remove(Engine, "before_cursor_execute", note)
    assert 4 <= len(asked) <= 24


def test_a_study_without_a_right_trial_has_no_best(either):
    study = make_study(either)
    record(either, study, 1, TrialState.WRONG_RESULT, reason="It differs.")
    with pytest.raises(UnknownRecord, match="no best trial yet: study first has none"):
        chosen_trial(either, "best")
    best = record(either, study, 2, timings=(timing("screen", 2.0),))
    record(either, study, 3, timings=(timing("screen", 3.0),))
    assert chosen_trial(either, "best").number == best.number and chosen_trial(either, "1").number == 1
    for word in ("first", "-1", "²", "1" * 13):
        with pytest.raises(UnknownRecord, match="is not the number of a trial"):
            chosen_trial(either, word)


@pytest.mark.slow
def test_threads_make_databases_at_once(tmp_path):
    def make(number):
        Storage.open(str(tmp_path / f"{number}.sqlite")).close()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(make, range(16)))


def test_of_many_trials_the_better_half_and_an_even_sample_are_named(storage):
    study, other = make_study(storage), make_study(storage, "second")
    for n in range(12):
        record(storage, study, n, timings=(timing("screen", 50.0 - n),))
        record(storage, other, n, timings=(timing("final" if n % 3 else "screen", 1.0 + n),))
    own = [trial.number for trial in storage.iter_trials(study)]
    assert storage.numbers(study, 12) == (own, 12) and storage.numbers(study, 99) == (own, 12)
    assert storage.numbers(study, 6) == (sorted({*own[9:], own[3], own[7], own[11]}), 12)
    assert storage.numbers(study, 11) == (sorted({*own[7:], *own[1::2]}), 12)
    assert storage.count_finals(study) == 0 and storage.count_finals(other) == 8
    assert [t.number for t in storage.iter_trials(study, among=[own[5], own[2], -1])] == [own[2], own[5]]
    assert [t.number for t in storage.iter_trials(study, after=own[8])] == own[9:]
    best = [trial.number for trial in storage.leaderboard(study, 3)]
    assert best == own[:-4:-1] and storage.leaderboard(study, 3, operator="mutation") == []
