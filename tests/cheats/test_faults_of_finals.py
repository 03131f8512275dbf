"""Faults of finals that once passed the tests: inputs that a finalist spoils, for others or before the timing."""

from evoattn.evaluation.tasks import HoldFinal
from evoattn.timing.protocol import Protocol
from tests.cheats.fake_kernels import make_evaluator
from tests.cheats.test_contest import entered, honest, make_peer, right

SHORT = Protocol("final", 3, 200.0, most_calls=4)


def test_a_peer_finds_the_inputs_whole_after_a_finalist_that_changes_them():
    def spoils(launch):
        launch.write()
        launch.views["v"].mul_(2)

    evaluator = make_evaluator(rival=make_peer(right))
    timings, refusals, complete = evaluator.final(HoldFinal(entered(a=honest, b=spoils), SHORT, ()))
    assert complete and not refusals and timings["rival"].samples_us
    assert timings["b"].disqualified and not timings["a"].disqualified


def test_a_finalist_that_changed_its_inputs_before_it_was_timed_is_disqualified():
    def changes_once(launch):
        launch.write()
        if launch.count == 0:
            launch.views["v"].add_(1)

    timings, _, complete = make_evaluator().final(HoldFinal(entered(a=honest, b=changes_once), SHORT, ()))
    assert complete and timings["b"].samples_us
    assert timings["b"].disqualified and not timings["a"].disqualified
