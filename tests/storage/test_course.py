"""The course of a study is what its trials say one by one."""

from contextlib import nullcontext
from unittest import mock

import pytest
from sqlalchemy import text

from evoattn.model.records import TrialState
from evoattn.storage import StorageError
from evoattn.storage.course import Tried, _tried
from tests.report.report_studies import add, make_study, timed_study, timing


@pytest.mark.slow
def test_each_trial_is_as_it_is_read_alone(storage):
    study = timed_study(storage, 30)
    offline = make_study(storage, name="another", offline=True)
    for n in range(3):
        add(storage, offline, TrialState.ESTIMATED, cost=1.0 + n, A=n)
    best = storage.leaderboard(study, 1)[0]
    lost = timing(9.0, "final")
    lost.protocol["disqualified"] = "In the final: it is wrong."
    storage.add_timing(best.number, lost)
    with mock.patch("evoattn.storage.course._tried", side_effect=AssertionError("a sound page is read at once")):
        course, estimated = storage.course(study), storage.course(offline)
    for said, of in ((course, study), (estimated, offline)):
        trials = storage.iter_trials(of)
        assert said == [Tried(**{name: getattr(trial, name) for name in Tried._fields}) for trial in trials]
    assert next(tried.value for tried in course if tried.number == best.number) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("config", "3"),
        ("config", '{"A": []}'),
        ("config", "{},{}"),
        ("config", "{"),
        ("parents", '["one"]'),
        ("state", "FOO"),
    ],
)
def test_a_damaged_trial_is_named(storage, column, value):
    study = make_study(storage, offline=True)
    for n in range(3):
        add(storage, study, TrialState.ESTIMATED, cost=1.0 + n, A=n)
    with storage._engine.begin() as connection:
        connection.execute(text(f"UPDATE trials SET {column} = :value WHERE number = 2"), {"value": value})
    with pytest.raises(StorageError, match="use another copy"):
        storage.course(study)


@pytest.mark.parametrize(("cost", "taken"), [(0.5, True), (0.0, False)])
def test_a_relative_cost_is_above_zero(cost, taken):
    with nullcontext() if taken else pytest.raises(ValueError, match="a relative cost of 0"):
        assert _tried([1, "f", "ESTIMATED", cost, "random", "2026-11-27", {"A": 1}, []], None).value == cost
