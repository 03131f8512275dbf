"""Cheating about what a kernel writes beside O: the log-sum-exp, and scratch that must stay zero."""

import pytest

from evoattn.model.records import TrialState
from tests.cheats.fake_kernels import FAMILY, PROBLEM, Launch, evaluate, make_evaluator
from tests.cheats.timed_cheats import CHECKED, honest

SECOND_WARM_UP = 17
"""The launch before which no scratch buffer is poisoned again."""


def rests_on_the_second_output_when_timed(launch: Launch) -> None:
    kept = launch.views["lse"].clone()
    launch.write()
    if launch.count >= CHECKED:
        launch.views["lse"].copy_(kept)


def is_off_in_the_second_output(launch: Launch) -> None:
    launch.write()
    launch.views["lse"].add_(0.01)


def changes_the_second_output_when_timed(launch: Launch) -> None:
    launch.write()
    if launch.count >= CHECKED + 4:
        launch.views["lse"][0, 0, 0] += 1e-5


@pytest.fixture(scope="module")
def lse_evaluator():
    return make_evaluator(PROBLEM.with_(lse=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cheat, words",
    [
        (rests_on_the_second_output_when_timed, "timed replays left outputs unwritten"),
        (is_off_in_the_second_output, "the largest error of a log-sum-exp is"),
        (changes_the_second_output_when_timed, "timed replays left another output than the validated one"),
    ],
)
def test_the_log_sum_exp_is_watched_as_the_output_is(lse_evaluator, cheat, words):
    lse_evaluator.broken = False
    found = evaluate(lse_evaluator, cheat)
    assert found.state is TrialState.WRONG_RESULT and words in found.reason, (found.state, found.reason)
    assert evaluate(lse_evaluator, honest).state is TrialState.COMPLETE


class WithScratch(type(FAMILY)):
    """The family, as if its kernels used scratch buffers, one of which stays zero."""

    def workspace(self, *words):
        return {"partials": 16, "tickets_zeroed": 8}


def counts_tickets_and_clears_them(launch: Launch) -> None:
    assert not launch.buffers["tickets_zeroed"].any() and (
        launch.count >= CHECKED or launch.count == SECOND_WARM_UP or (launch.buffers["partials"] == 0xFF).all()
    )
    launch.buffers["partials"].fill_(1)
    launch.write()


def leaves_its_tickets(launch: Launch) -> None:
    launch.write()
    launch.buffers["tickets_zeroed"][1] = 1


def leaves_its_tickets_when_timed(launch: Launch) -> None:
    launch.write()
    if launch.count >= CHECKED:
        launch.buffers["tickets_zeroed"][1] = 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "play, words",
    [
        (counts_tickets_and_clears_them, ""),
        (leaves_its_tickets, "did not leave zeros in tickets_zeroed"),
        (
            leaves_its_tickets_when_timed,
            "Case 'fresh inputs after timing': the kernel did not leave zeros in tickets_zeroed",
        ),
    ],
)
def test_scratch_that_must_stay_zero_is_so_before_and_after_the_timing(play, words):
    found = evaluate(make_evaluator(), play, family=WithScratch())
    assert found.state is (TrialState.WRONG_RESULT if words else TrialState.COMPLETE) and words in found.reason, (
        found.reason
    )
