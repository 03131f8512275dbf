"""The small cases together: what one verdict over all of them sees, and what it costs."""

import math

import pytest
import torch

from evoattn.backends.base import LaunchError
from evoattn.correctness.cases import device_cases, make_case
from evoattn.correctness.ladder import Ladder
from evoattn.correctness.validate import run_case
from evoattn.families.flash_scalar.family import FlashScalar
from tests.cheats.fake_kernels import PROBLEM, FakeBackend, FakeKernel, Launch, built

BACKEND = FakeBackend()
KEYS = [case.seqlen_k for _, case, _ in device_cases(PROBLEM)]


def make_ladder(problem=PROBLEM):
    return Ladder([make_case(name, case, 3, "cpu", kind) for name, case, kind in device_cases(problem)], BACKEND.device)


@pytest.fixture(scope="module")
def ladder():
    return make_ladder()


@pytest.fixture(scope="module")
def with_sums():
    return make_ladder(PROBLEM.with_(lse=True))


def climb(ladder, play):
    """(results, launches)"""
    fake = FakeKernel(play)
    return ladder.climb(BACKEND, built(fake)), fake.launches


@pytest.mark.parametrize("which", ["ladder", "with_sums"])
def test_who_is_right_is_launched_twice_a_case_with_the_errors_of_each(which, request):
    ladder = request.getfixturevalue(which)
    results, launches = climb(ladder, Launch.write)
    assert launches == 2 * len(ladder.cases) and all(r.passed and not r.reason for r in results)
    alone = [run_case(BACKEND, built(FakeKernel(Launch.write)), case, repeat=True)[0] for case in ladder.cases]
    assert [(r.case, r.max_error, r.allowed_error) for r in results] == [
        (r.case, r.max_error, r.allowed_error) for r in alone
    ]


def spoils(change, name="o"):
    """Right, but for what `change` does to an output of the fifth case."""

    def play(launch: Launch) -> None:
        launch.write()
        if launch.problem.seqlen_k == KEYS[4]:
            change(launch.views[name], launch)

    return play


def set_one(value):
    return lambda view, launch: view.view(-1)[7:8].fill_(value)


class InAnyOrder(FlashScalar):
    """Sums up O in any order."""

    def unordered(self, problem, config):
        return ("o",)


@pytest.mark.parametrize("off, passes", [(1e-3, True), (0.5, False)])
def test_sums_in_any_order_are_judged_in_both_runs(ladder, off, passes):
    fake = FakeKernel(spoils(lambda o, launch: o.view(-1)[7:8].add_((launch.count >= len(KEYS)) * off)))
    results = ladder.climb(BACKEND, built(fake, InAnyOrder()))
    assert results[-1].passed == passes
    if not passes:
        assert "the largest error is" in results[-1].reason


@pytest.mark.parametrize(
    "play, words",
    [
        (spoils(set_one(math.nan)), "1 of"),
        (spoils(set_one(100.0)), "the largest error is"),
        (spoils(lambda o, launch: o.view(torch.int16).view(-1)[7:8].fill_(-1)), "1 of"),
        (spoils(lambda o, launch: o.add_(launch.count % 2 * 1e-2)), "remembers its launches"),
        (spoils(lambda o, launch: launch.views["k"].view(-1)[-1:].add_(1)), "changed 2 elements of its input k"),
        (spoils(lambda o, launch: o.as_strided((1,), (1,), o.storage_offset() - 1).fill_(0)), "wrote outside"),
    ],
)
def test_a_fault_of_one_case_is_named_by_that_case_alone(ladder, play, words):
    results, _ = climb(ladder, play)
    assert [r.passed for r in results] == [True] * 4 + [False]
    assert words in results[-1].reason and results[-1].case == ladder.cases[4].name, results[-1].reason


@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e6])
def test_a_wrong_sum_is_seen(with_sums, value):
    results, _ = climb(with_sums, spoils(set_one(value), "lse"))
    assert not results[-1].passed and "log-sum-exp" in results[-1].reason


def test_the_mean_error_is_held_to_its_bound(ladder):
    """An error that no element shows: each is within the largest error that is allowed."""
    allowed = ladder.cases[4].answer["o"].allowed_error
    results, _ = climb(ladder, spoils(lambda o, launch: o.add_(0.6 * allowed)))
    assert not results[-1].passed and "root-mean-square" in results[-1].reason


def test_who_is_right_alone_and_wrong_in_a_row_is_wrong(ladder):
    def play(launch: Launch) -> None:
        launch.write()
        if launch.count == 5:
            launch.views["o"].zero_()

    results, _ = climb(ladder, play)
    assert [r.passed for r in results] == [True] * 7 + [False] and "one behind the other" in results[-1].reason


def test_a_refused_launch_is_raised(ladder):
    def refuses(launch: Launch) -> None:
        raise LaunchError("No.")

    with pytest.raises(LaunchError, match="No"):
        climb(ladder, refuses)
