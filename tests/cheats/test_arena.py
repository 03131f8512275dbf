"""Guard bands, poison and the vault. The small cases together: what one verdict over all of them sees, and what it
costs."""

import math

import pytest
import torch

from evoattn.backends.base import LaunchError
from evoattn.correctness.arena import BANDS, GUARD_BYTES, UNWRITTEN, Arena, Layout, Vault, bits
from evoattn.correctness.cases import device_cases, make_case
from evoattn.correctness.ladder import Ladder
from evoattn.correctness.validate import run_case
from evoattn.families.flash_scalar.family import FlashScalar
from tests.cheats.fake_kernels import PROBLEM, FakeBackend, FakeKernel, Launch, built


def make_arena():
    inputs = {"q": torch.arange(24, dtype=torch.float16).view(2, 3, 4), "k": torch.ones(2, 5).T}
    return inputs, Arena(
        inputs,
        {"o": Layout((2, 3), (3, 1), torch.float16)},
        {"partials": 10, "counters_zeroed": 8},
        torch.device("cpu"),
    )


def test_inputs_are_copied_with_their_strides_and_the_rest_is_poisoned():
    inputs, arena = make_arena()
    arena.arm()
    assert all(torch.equal(arena.views[n], t) and arena.views[n].stride() == t.stride() for n, t in inputs.items())
    assert (bits(arena.views["o"]) == UNWRITTEN).all() and (arena.buffers["partials"] == 0xFF).all()
    assert arena.buffers["counters_zeroed"].tolist() == [0] * 8
    assert arena.buffers["o"].numel() == 6 and arena.buffers["o"].data_ptr() == arena.views["o"].data_ptr()
    assert arena.changed_bands() == 0 and sum(arena.changed_inputs()) == 0 and arena.outputs.keys() == {"o"}


def test_zeros_that_a_kernel_does_not_leave_are_counted():
    _, arena = make_arena()
    arena.arm()
    assert arena.zeroed == ("counters_zeroed",) and [int(n) for n in arena.dirty_zeros()] == [0]
    arena.buffers["counters_zeroed"][3:5] = 7
    assert [int(n) for n in arena.dirty_zeros()] == [2]
    arena.arm()
    assert [int(n) for n in arena.dirty_zeros()] == [0]


def test_every_byte_beside_every_buffer_is_guarded():
    for name in ("q", "k", "o", "partials", "counters_zeroed"):
        for band in BANDS:
            for beside in (-1, -GUARD_BYTES, 0, GUARD_BYTES - 1):
                _, arena = make_arena()
                arena.arm(band)
                piece = arena.buffers[name].view(torch.uint8)
                at = piece.storage_offset() + (beside if beside < 0 else piece.numel() + beside)
                arena.whole[at] = 1
                assert arena.changed_bands() == 1, (name, beside)
                assert arena.touched_band() in arena.buffers


def test_changed_inputs_are_counted_and_restored():
    inputs, arena = make_arena()
    arena.views["k"][0, 0] = -1
    arena.views["k"][4, 1] = float("nan")
    assert [int(n) for n in arena.changed_inputs()] == [0, 2]
    arena.restore()
    assert sum(arena.changed_inputs()) == 0
    arena.refill({n: t + 1 for n, t in inputs.items()}, {})
    assert arena.views["q"][0, 0, 0] == 1 and sum(arena.changed_inputs()) == 0


def test_a_vault_sees_one_changed_bit():
    tensors = [torch.zeros(7), torch.zeros(5, 3, dtype=torch.bfloat16)]
    vault = Vault(tensors)
    assert vault.intact()
    tensors[1][2, 2] = -0.0
    assert not vault.intact()


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


@pytest.mark.parametrize("value, passes", [(float("nan"), True), (1.0, False)])
def test_a_ladder_asks_for_nan_where_there_is_no_answer(value, passes):
    name, problem, kind = device_cases(PROBLEM)[0]
    case = make_case(name, problem, 3, "cpu", kind)
    case.answer["o"].values.view(-1)[7] = float("nan")

    def play(launch: Launch) -> None:
        launch.write()
        launch.views["o"].view(-1)[7:8].fill_(value)

    results, _ = climb(Ladder([case], BACKEND.device), play)
    assert [one.passed for one in results] == [passes]


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
