"""Kernels that cheat the real evaluator: each is caught and named. Cheating about what a kernel writes beside O: the
log-sum-exp, and scratch that must stay zero."""

import pytest
import torch

from evoattn.evaluation.device import DeviceEvaluator
from evoattn.evaluation.tasks import Evaluate, HoldFinal
from evoattn.model import gpu
from evoattn.model.records import TrialState
from evoattn.timing.protocol import RACE, Protocol
from tests.cheats import faults
from tests.cheats.fake_kernels import (
    FAMILY,
    PROBLEM,
    FakeBackend,
    FakeKernel,
    FakeTimer,
    Launch,
    built,
    evaluate,
    make_evaluator,
)
from tests.cheats.timed_cheats import (
    CHECKED,
    Cached,
    changes_its_inputs_when_timed,
    depends_on_its_output,
    honest,
    reads_before_its_input,
    rests_when_timed,
    right_for_the_seed_of_the_past,
    right_for_the_timed_shape,
    right_on_the_first_call,
    works_on_every_second_call,
    works_on_every_third_launch_when_timed,
    writes_nothing,
    writes_outside_when_timed,
    writes_past_its_output,
)

SHORT = Protocol("final", 5, 200.0, most_calls=8)


@pytest.fixture(scope="module")
def evaluator():
    return make_evaluator()


@pytest.mark.slow
@pytest.mark.parametrize(
    "cheat, words",
    [
        (writes_nothing, "were never written"),
        (right_on_the_first_call, "were never written"),
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
def test_a_cheat_is_caught_and_named(evaluator, cheat, words):
    evaluator.broken = False
    found = evaluate(evaluator, cheat)
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


def test_who_is_far_behind_the_best_is_pruned_after_the_small_cases_and_a_race(evaluator):
    found = evaluate(evaluator, honest, us=50.0, best_us=39.0)
    assert found.state is TrialState.PRUNED and "1.28 times the best so far" in found.reason
    assert len(found.validation.checks) == 8 and [len(t.samples_us) for t in found.timings] == [RACE]
    assert found.timing.median_us == 50.0
    found = evaluate(evaluator, honest, us=5000.0, best_us=39.0)
    assert found.state is TrialState.PRUNED and [len(t.samples_us) for t in found.timings] == [1]


@pytest.mark.parametrize(
    "best_us, stages", [(46.0, ["screen"]), (48.0, ["screen", "repeat"]), (99.0, ["screen", "repeat"])]
)
def test_who_is_near_the_best_is_proved_in_full(evaluator, best_us, stages):
    found = evaluate(evaluator, honest, us=50.0, best_us=best_us)
    assert found.state is TrialState.COMPLETE and len(found.validation.checks) == 10
    assert [t.protocol["stage"] for t in found.timings] == stages


@pytest.mark.slow
@pytest.mark.parametrize(
    "cheat", [right_for_the_timed_shape, right_on_the_first_call, works_on_every_second_call, writes_outside_when_timed]
)
def test_who_wins_the_race_by_a_lie_is_caught(cheat):
    found = evaluate(make_evaluator(), cheat, us=50.0, best_us=60.0)
    assert found.state is TrialState.WRONG_RESULT, found.reason


def test_who_harms_memory_in_the_race_is_blamed_although_it_is_slow():
    evaluator = make_evaluator()

    def harms(launch: Launch) -> None:
        launch.write()
        evaluator.fresh.answer["o"].values[0, 0, 0, 0] += 1

    found = evaluate(evaluator, harms, us=99.0, best_us=10.0)
    assert found.state is TrialState.WRONG_RESULT and evaluator.broken


def test_every_process_draws_its_own_inputs(evaluator):
    assert make_evaluator().seed != evaluator.seed


@pytest.mark.slow
def test_faster_than_the_hardware_is_implausible(evaluator):
    found = evaluate(evaluator, honest, us=1e-4)
    assert found.state is TrialState.IMPLAUSIBLE and "peak rates" in found.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "hit",
    [
        lambda ladder: ladder.cases[0].answer["o"].values,
        *(lambda ladder, number=number: ladder.tensors[number] for number in range(6)),
    ],
)
def test_who_corrupts_memory_that_is_not_its_own_is_blamed_and_the_worker_replaced(hit):
    evaluator = make_evaluator()

    def harms_the_next(launch: Launch) -> None:
        launch.write()
        hit(evaluator.ladder).view(-1)[-1:].view(torch.uint8)[0] += 1  # where a wild write lands

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


@pytest.mark.slow
def test_a_finalist_that_lies_in_the_final_is_disqualified():
    evaluator = make_evaluator()
    kernels = {
        "1": FakeKernel(honest),
        "2": FakeKernel(rests_when_timed, launches=CHECKED - 2),
        "3": FakeKernel(honest, us=1e-4),
    }
    timings, _, complete = evaluator.final(HoldFinal({n: built(k) for n, k in kernels.items()}, SHORT))
    verdicts = {n: t.protocol.get("disqualified", "") for n, t in timings.items()}
    assert complete
    assert not verdicts["1"] and "does less work when it is timed" in verdicts["2"] and "peak rates" in verdicts["3"]
    assert len({t.protocol["run"] for t in timings.values()}) == 1


def test_cheats_that_count_know_how_many_launches_come_before_the_timing():
    fake, before = FakeKernel(honest), list[int]()

    class CountingTimer(FakeTimer):
        def capture(self, calls):
            before.append(fake.launches)
            return super().capture(calls)

    backend = FakeBackend()
    evaluator = DeviceEvaluator(PROBLEM, gpu.GPUS["h100"], backend=backend, timer=CountingTimer(backend), peers={})
    assert evaluator.evaluate(Evaluate(built(fake), None)).state is TrialState.COMPLETE
    assert before[0] == CHECKED == faults.CHECKED


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
