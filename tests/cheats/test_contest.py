"""A final in which somebody fails, wherever it may be: that one is out with a sentence, and the others get their
times."""

import pytest
import torch

from evoattn.backends.base import ContextLost, LaunchError
from evoattn.engine.finals import Final, FinalFailed
from evoattn.evaluation.process import Ending
from evoattn.evaluation.tasks import HoldFinal
from evoattn.evaluation.workers import Outcome
from evoattn.peers.table import Peer
from evoattn.timing.protocol import FinalResult, Protocol
from tests.cheats.fake_kernels import FakeKernel, Launch, built, make_evaluator

SHORT = Protocol("final", 3, 200.0, most_calls=4)
FIRST_CALL, WARM_UP, PROBE, FIRST_REPLAY, ROUNDS, PROOF = 0, 2, 5, 14, 25, 42
"""Launches of a fake kernel before each part of a final of three rounds with four calls per replay."""


@pytest.fixture(scope="module")
def evaluator():
    """Without a peer."""
    return make_evaluator()


def honest(launch: Launch) -> None:
    launch.write()


def fails(error: Exception, at: int):
    def play(launch: Launch) -> None:
        if launch.count == at:
            raise error
        launch.write()

    return play


def entered(**plays):
    return {name: built(FakeKernel(play)) for name, play in plays.items()}


def hold(evaluator, refused=(), **plays):
    return evaluator.final(HoldFinal(entered(**plays), SHORT, refused))


def make_peer(call) -> Peer:
    return Peer(lambda problem, tensors: lambda: call(tensors), "torch")


def right(tensors) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*(tensors[t] for t in "qkv"))


@pytest.mark.parametrize("at", [FIRST_CALL, WARM_UP, PROBE, FIRST_REPLAY, ROUNDS, PROOF])
@pytest.mark.parametrize(
    "error, harmless", [(LaunchError("Too many registers."), True), (ContextLost("An illegal address."), False)]
)
@pytest.mark.slow
def test_a_finalist_that_fails_is_out_and_the_others_go_on(at, error, harmless):
    evaluator = make_evaluator(rival=make_peer(right))
    final = Final(entered(a=honest, b=fails(error, at), c=honest), SHORT, ["rival"])
    tries = 0
    while not final.result:
        tries += 1
        result = evaluator.final(final.task)
        assert evaluator.broken != result.complete
        final.take(Outcome("final", Ending.RESULT, result, 1.0))
    assert tries == (1 if harmless else 2)
    timings, refusals, _ = final.result
    assert set(timings) == {"a", "b", "c", "rival"} and not refusals
    assert not timings["b"].samples_us and timings["b"].disqualified == f"In the final: {error}"
    assert (
        timings["a"].interleaved_with(timings["c"])
        and timings["a"].interleaved_with(timings["rival"])
        and not timings["a"].disqualified
    )


def test_a_finalist_without_room_is_out_but_not_disqualified(evaluator):
    timings, _, complete = hold(evaluator, a=honest, b=fails(torch.cuda.OutOfMemoryError("2 GiB"), FIRST_CALL))
    assert (
        complete
        and not timings["b"].disqualified
        and "more device memory" in timings["b"].protocol["out"]
        and timings["a"].samples_us
    )


def test_a_wrong_answer_after_the_timing_keeps_its_time_and_is_disqualified(evaluator):
    def wrong_when_proved(launch: Launch) -> None:
        launch.write()
        if launch.count >= PROOF:
            launch.views["o"].add_(1)

    timings, _, complete = hold(evaluator, a=honest, b=wrong_when_proved)
    assert (
        complete
        and timings["b"].samples_us
        and "back to back" in timings["b"].disqualified
        and not timings["a"].disqualified
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "calls, error, sentence",
    [
        (0, RuntimeError("No such tile."), "No such tile."),
        (1, TypeError("It cannot be captured."), "It fails when it is timed: It cannot be captured."),
        (4, RuntimeError("An illegal address."), "It fails when it is timed: An illegal address."),
        (20, RuntimeError("Lost."), "It fails when it is timed: Lost."),
    ],
)
def test_a_peer_that_fails_is_refused_and_the_others_go_on(calls, error, sentence):
    count = [0]

    def call(tensors):
        count[0] += 1
        if count[0] > calls:
            raise error
        return right(tensors)

    evaluator = make_evaluator(bad=make_peer(call), good=make_peer(right))
    timings, refusals, complete = hold(evaluator, a=honest)
    assert refusals == {"bad": sentence} and complete == (calls == 0)
    if not complete:
        timings, refusals, complete = hold(evaluator, tuple(refusals), a=honest)
    assert complete and set(timings) == {"a", "good"} and timings["good"].protocol["version"].startswith("torch ")


def test_a_peer_that_refuses_but_lost_the_device_costs_the_process():
    def call(tensors):
        evaluator.ladder.cases[0].answer["o"].values[0, 0, 0, 0] += 1  # what an illegal write may hit
        raise RuntimeError("An illegal address.")

    evaluator = make_evaluator(bad=make_peer(call))
    assert (
        hold(evaluator, a=honest) == FinalResult({}, {"bad": "An illegal address."}, complete=False)
        and evaluator.broken
    )


def test_a_bug_of_ours_is_no_finalist_s_fault(evaluator):
    with pytest.raises(KeyError):
        hold(evaluator, a=fails(KeyError("q"), ROUNDS))
    assert evaluator.broken


def ended(how: Ending, doing: str = "") -> Outcome:
    return Outcome("final", how, "The worker process ended with exit code 1.", 1.0, doing)


def test_who_kills_the_process_twice_or_hangs_it_is_out():
    final = Final({"7": None, "8": None, "9": None}, peers=["fa3", "fa4"])
    for how, doing, left in (
        (Ending.DIED, "fa3", ["7", "8", "9"]),
        (Ending.DIED, "fa3", ["7", "8", "9"]),
        (Ending.TIMEOUT, "8", ["7", "9"]),
        (Ending.TIMEOUT, "fa4", ["7", "9"]),
        (Ending.DIED, "9", ["7", "9"]),
        (Ending.DIED, "9", ["7"]),
    ):
        final.take(ended(how, doing))
        assert list(final.task.finalists) == left and not final.result
    assert final.task.refused == ("fa3", "fa4")
    final.take(Outcome("final", Ending.RESULT, FinalResult({}, {"math": "No memory."}), 1.0))
    assert set(final.result.refusals) == {"fa3", "fa4", "math"}
    assert "exit code 1. So it did 2 times" in final.result.refusals["fa3"]
    assert (
        final.result.timings["9"].disqualified
        and not final.result.timings["8"].disqualified
        and "ended at its turn" in final.result.timings["8"].protocol["out"]
    )


@pytest.mark.parametrize("ends", [[ended(Ending.DIED)] * 3, [ended(Ending.TIMEOUT)], [ended(Ending.RAISED, "7")]])
def test_a_final_that_nobody_in_it_spoils_fails_with_a_sentence(ends):
    final = Final({"7": None})
    for end in ends[:-1]:
        final.take(end)
    with pytest.raises(FinalFailed, match="exit code 1"):
        final.take(ends[-1])


@pytest.mark.slow
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
