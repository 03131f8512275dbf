"""What a trial counts for."""

from dataclasses import replace

import pytest

from evoattn.model.records import Timing, Trial, TrialState

TIMED = Timing((9.0, 10.0, 11.0), {"stage": "screen"})
TRIAL = Trial(
    1, 1, "flash_mma", {}, "id", TrialState.COMPLETE, "", None, None, None, (TIMED,), 3.5, (), "random", "", 0.0
)


@pytest.mark.parametrize(
    "changes, value",
    [
        ({}, 10.0),
        ({"timings": (TIMED, Timing((8.0,), {"stage": "final"}))}, 8.0),
        ({"timings": (TIMED, Timing.out("It lies.", disqualified=True))}, None),
        ({"timings": ()}, None),
        ({"timings": (Timing((0.0,), {}),)}, None),
        ({"state": TrialState.PRUNED}, None),
        ({"state": TrialState.WRONG_RESULT}, None),
        ({"state": TrialState.ESTIMATED, "timings": ()}, 3.5),
        ({"state": TrialState.ESTIMATED, "timings": (), "relative_cost": None}, None),
        ({"state": TrialState.ESTIMATED, "timings": (), "relative_cost": float("inf")}, None),
    ],
)
def test_the_value_of_a_trial_is_the_time_or_the_cost_of_a_right_one(changes, value):
    assert replace(TRIAL, **changes).value == value
