"""Lies that a check before the timing cannot see, told to the real evaluator by puppets (puppets.py): each is caught
and named."""

import pytest
import torch
from puppets import FAMILY, PROBLEM, Launch, Puppet, built, evaluate, make_evaluator

from evoattn.correctness import reference
from evoattn.evaluation.tasks import HoldFinal
from evoattn.model.records import TrialState
from evoattn.timing.protocol import FINAL

CHECKED = 18
"""Launches before the timing: eight cases and the problem's own shape, twice each."""


@pytest.fixture(scope="module")
def evaluator():
    return make_evaluator()


def honest(launch: Launch) -> None:
    launch.write()


def writes_nothing(launch: Launch) -> None:
    pass


def right_on_the_first_call(launch: Launch) -> None:
    if launch.count == 0:
        launch.write()


def works_on_every_second_call(launch: Launch) -> None:
    if launch.count % 2:
        launch.write()


def right_for_the_timed_shape(launch: Launch) -> None:
    if launch.problem.seqlen_q == PROBLEM.seqlen_q:
        launch.write()
    else:
        launch.views["o"].zero_()


def right_for_the_seed_of_the_past(launch: Launch) -> None:
    known = reference.make_inputs(launch.problem, 1, "cpu")["q"]
    launch.views["o"].copy_(launch.answer() if torch.equal(launch.views["q"], known) else launch.answer() * 0.5)


def rests_when_timed(launch: Launch) -> None:
    if not CHECKED + 4 <= launch.count < CHECKED + 60:
        launch.write()


def works_on_every_third_launch_when_timed(launch: Launch) -> None:
    if launch.count < CHECKED or launch.count % 3 == 0:
        launch.write()


def changes_its_inputs_when_timed(launch: Launch) -> None:
    launch.write()
    if launch.count == CHECKED + 30:
        launch.views["k"][..., 0] += 1


def writes_outside_when_timed(launch: Launch) -> None:
    launch.write()
    if launch.count > CHECKED:
        whole = launch.buffers["o"].untyped_storage()
        whole[launch.buffers["o"].storage_offset() * 2 + launch.buffers["o"].numel() * 2] = 7


def writes_past_its_output(launch: Launch) -> None:
    launch.write()
    launch.buffers["o"].untyped_storage()[
        launch.buffers["o"].storage_offset() * 2 + launch.buffers["o"].numel() * 2
    ] = 7


def reads_before_its_input(launch: Launch) -> None:
    launch.write()
    if launch.buffers["q"].untyped_storage()[launch.buffers["q"].storage_offset() * 2 - 1] != 0x5A:
        launch.views["o"][0, 0, 0] += 1


def depends_on_its_output(launch: Launch) -> None:
    stale = launch.views["o"].clone()
    launch.views["o"].copy_(torch.where(torch.isnan(stale), stale, launch.answer()))


class Cached:
    """Computes an answer once for each address of Q, and copies it from then on."""

    def __init__(self):
        self.answers = {}

    def __call__(self, launch: Launch) -> None:
        key = launch.buffers["q"].data_ptr(), launch.views["q"].shape
        self.answers.setdefault(key, launch.answer())
        if launch.count < CHECKED:
            self.answers[key] = launch.answer()
        launch.views["o"].copy_(self.answers[key])


@pytest.mark.parametrize(
    "liar, words",
    [
        (writes_nothing, "were never written"),
        (right_on_the_first_call, "remembers its launches"),
        (works_on_every_second_call, "remembers its launches"),
        (right_for_the_timed_shape, "the largest error is"),
        (right_for_the_seed_of_the_past, "the largest error is"),
        (rests_when_timed, "timed replays left outputs unwritten: the kernel does less work when it is timed"),
        (
            works_on_every_third_launch_when_timed,
            "launches back to back, an output each, did not leave the validated one",
        ),
        (changes_its_inputs_when_timed, "timed replays changed the inputs"),
        (writes_outside_when_timed, "wrote outside its buffers when it was timed"),
        (writes_past_its_output, "wrote outside its buffers, beside o"),
        (reads_before_its_input, "reads out of bounds"),
        (depends_on_its_output, "were never written"),
        (Cached(), "on fresh inputs in the timed buffers, the largest error is"),
    ],
)
def test_a_liar_is_caught_and_named(evaluator, liar, words):
    evaluator.broken = False
    found = evaluate(evaluator, liar)
    assert found.state is TrialState.WRONG_RESULT and words in found.reason, (found.state, found.reason)
    assert evaluator.broken == ("outside" in words)  # memory may be harmed: the worker is replaced
    assert evaluate(evaluator, honest).state is TrialState.COMPLETE


def test_an_honest_kernel_passes_with_its_evidence(evaluator):
    found = evaluate(evaluator, honest)
    assert found.state is TrialState.COMPLETE and not found.reason and not found.doubtful
    assert [c.case for c in found.validation.checks][-2:] == ["the problem's own shape", "fresh inputs after timing"]
    assert found.validation.seed == evaluator.seed and all(c.seconds > 0 for c in found.validation.checks)
    assert [t.protocol["stage"] for t in found.timings] == ["screen", "repeat"]
    assert found.timing.protocol["clocks"].keys() == {"absent"} or "sm_mhz" in found.timing.protocol["clocks"]


def test_every_process_draws_its_own_inputs(evaluator):
    assert make_evaluator().seed != evaluator.seed


def test_faster_than_the_hardware_is_implausible(evaluator):
    found = evaluate(evaluator, honest, us=1e-4)
    assert found.state is TrialState.IMPLAUSIBLE and "peak rates" in found.reason


def test_who_corrupts_memory_that_is_not_its_own_is_blamed_and_the_worker_replaced():
    evaluator = make_evaluator()

    def harms_the_next(launch: Launch) -> None:
        launch.write()
        evaluator.ladder[0].answer.exact[0, 0, 0, 0] += 1  # a wild write that lands in an answer

    found = evaluate(evaluator, harms_the_next)
    assert found.state is TrialState.WRONG_RESULT and evaluator.broken
    assert "overwrote memory that it was never given" in found.reason


def test_a_harmed_process_does_not_blame_the_next_candidate():
    evaluator = make_evaluator()
    harmed = []

    def answers_unless_harmed(launch: Launch) -> None:
        launch.write()
        if harmed:
            launch.views["o"].add_(1)

    assert evaluate(evaluator, answers_unless_harmed).state is TrialState.COMPLETE  # the canary
    harmed.append(True)
    found = evaluate(evaluator, answers_unless_harmed)
    assert found.state is TrialState.WRONG_RESULT and found.doubtful and evaluator.broken


def test_a_finalist_that_lies_in_the_final_is_disqualified():
    evaluator = make_evaluator()
    kernels = {"1": Puppet(honest), "2": Puppet(rests_when_timed, launches=CHECKED - 2), "3": Puppet(honest, us=1e-4)}
    timings, _, complete = evaluator.final(HoldFinal({n: built(k) for n, k in kernels.items()}, FINAL))
    verdicts = {n: t.protocol.get("disqualified", "") for n, t in timings.items()}
    assert complete
    assert not verdicts["1"] and "does less work when it is timed" in verdicts["2"] and "peak rates" in verdicts["3"]
    assert len({t.protocol["run"] for t in timings.values()}) == 1


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


@pytest.mark.parametrize(
    "liar, words",
    [
        (rests_on_the_second_output_when_timed, "timed replays left outputs unwritten"),
        (is_off_in_the_second_output, "the largest error of a log-sum-exp is"),
        (changes_the_second_output_when_timed, "timed replays left another output than the validated one"),
    ],
)
def test_the_log_sum_exp_is_watched_as_the_output_is(lse_evaluator, liar, words):
    lse_evaluator.broken = False
    found = evaluate(lse_evaluator, liar)
    assert found.state is TrialState.WRONG_RESULT and words in found.reason, (found.state, found.reason)
    assert evaluate(lse_evaluator, honest).state is TrialState.COMPLETE


class WithScratch(type(FAMILY)):
    """The family, as if its kernels used scratch buffers, one of which stays zero."""

    def workspace(self, *words):
        return {"partials": 16, "tickets_zeroed": 8}


def counts_tickets_and_clears_them(launch: Launch) -> None:
    assert not launch.buffers["tickets_zeroed"].any() and (
        launch.count >= CHECKED or (launch.buffers["partials"] == 0xFF).all()
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
