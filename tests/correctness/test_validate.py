"""What a check finds: a backend made of Python writes what a wrong kernel would."""

import math
import time
from dataclasses import replace

import pytest
import torch

from evoattn.correctness.arena import BANDS, GUARD_BYTES, UNWRITTEN
from evoattn.correctness.cases import make_case
from evoattn.correctness.judge import apart, judge, judge_one
from evoattn.correctness.reference import Exact
from evoattn.correctness.validate import check, run_case
from evoattn.model.problem import AttentionProblem

PROBLEM = AttentionProblem(1, 2, 2, 40, 40, 16, "fp16", "causal_upper_left", "bhsd", lse=True)
CASE = make_case("small", PROBLEM, 0, "cpu", double=True)


class Kernel:
    """Stands where a `BuiltKernel` stands: it has one scratch buffer, which must be left zero."""

    compiled = None

    def workspace(self, problem):
        return {"turns_zeroed": 8}

    def unordered(self, problem):
        return ()

    def launches(self, problem):
        return ()


class Backend:
    """Writes the right answer, then lets `spoil(buffers, number of the run)` change what it likes."""

    name = "python"
    device = torch.device("cpu")

    def __init__(self, spoil, faults=()):
        self.spoil, self.faults, self.runs = spoil, faults, 0

    def run(self, compiled, launches, buffers):
        buffers["o"].copy_(CASE.answer["o"].values.to(torch.float16).flatten())
        buffers["lse"].copy_(CASE.answer["lse"].values.flatten())
        self.spoil(buffers, self.runs)
        self.runs += 1
        return self.faults


def checked(spoil=lambda buffers, run: None, repeat=False, faults=()):
    return run_case(Backend(spoil, faults), Kernel(), CASE, repeat)


def put(name, place, value):
    """A spoiler that writes one element."""

    def spoil(buffers, run):
        buffers[name][place] = value

    return spoil


def before(buffers, name):
    """The byte before a buffer: of the guard band."""
    tensor = buffers[name].view(torch.uint8)
    return tensor.as_strided((1,), (1,), tensor.storage_offset() - 1)


@pytest.mark.parametrize("repeat", [False, True])
def test_the_right_answer_passes(repeat):
    result, outputs = checked(repeat=repeat)
    assert result.passed and result.reason == "" and result.case == "small"
    assert result.max_error <= result.allowed_error and outputs.keys() == {"o", "lse"}


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        (put("o", 5, float("nan")), "1 of 1280 outputs are NaN"),
        (lambda buffers, run: buffers["o"].view(torch.int16)[7:9].fill_(-1), "2 of 1280 outputs were never written"),
        (put("o", 9, 30.0), "the largest error is"),
        (lambda buffers, run: buffers["lse"].view(torch.int32)[3:4].fill_(-1), "1 of 80 log-sum-exps were never"),
        (put("lse", 3, float("nan")), "1 of 80 log-sum-exps are NaN"),
        (put("lse", 3, -math.inf), "must be -inf for a query that sees no key"),
        (put("lse", 3, 100.0), "the largest error of a log-sum-exp is"),
        (put("turns_zeroed", 2, 1), "did not leave zeros in turns_zeroed"),
        (put("k", 11, 1.0), "changed 1 elements of its input k"),
        (lambda buffers, run: before(buffers, "o").fill_(1), "wrote outside its buffers, beside v"),
    ],
)
def test_each_rule_names_what_breaks_it(spoil, sentence):
    result, outputs = checked(spoil)
    assert not result.passed and result.reason.startswith("Case 'small': ") and sentence in result.reason
    assert outputs is not None


def test_a_fault_of_the_run_comes_first_and_leaves_no_outputs():
    result, outputs = checked(put("o", 5, float("nan")), faults=("Race in shared memory: one.", "Another."))
    assert result.reason == "Case 'small': Race in shared memory: one." and outputs is None and not result.passed


def test_small_errors_everywhere_break_the_rule_for_their_mean():
    """As a skipped tile of keys does, whose largest error alone would pass."""
    exact = torch.zeros(1000, dtype=torch.float64)
    answer = Exact(exact, allowed_error=1e-2, allowed_rms=1e-3)
    few, many = exact.clone(), exact.clone()
    few[:5], many[:] = 5e-3, 5e-3
    assert judge_one(few, answer)[0] == "" and "root-mean-square error" in judge_one(many, answer)[0]


def test_what_has_no_answer_is_nan_and_nothing_else_is():
    answer = Exact(torch.tensor([math.nan, 1.0], dtype=torch.float64), 1e-2, 1e-2)
    assert judge_one(torch.tensor([math.nan, 1.0]), answer)[0] == ""
    assert "1 of 2 outputs are NaN" in judge_one(torch.tensor([math.nan, math.nan]), answer)[0]
    assert "error is nan" in judge_one(torch.tensor([1.0, 1.0]), answer)[0]
    sums = replace(answer, logarithms=True)
    assert judge_one(torch.tensor([math.nan, 1.0]), sums)[0] == ""
    assert "1 of 2 log-sum-exps are NaN" in judge_one(torch.tensor([math.nan, math.nan]), sums)[0]
    assert "log-sum-exp is nan" in judge_one(torch.tensor([1.0, 1.0]), sums)[0]


@pytest.mark.parametrize("logarithms", [False, True])
def test_what_is_not_the_kernel_s_is_left_as_it_was(logarithms):
    """All else is judged as where everything is."""
    answer = Exact(torch.tensor([math.nan, 1.0], dtype=torch.float64), 1e-2, 1e-2, logarithms=logarithms, partial=True)
    left = torch.full((2,), UNWRITTEN, dtype=torch.int32).view(torch.float32)
    out = left.clone()
    out[1] = 1.001
    wrong, largest = judge_one(out, answer)
    assert not wrong and largest == pytest.approx(1e-3, rel=1e-3)
    assert judge_one(torch.ones(2), answer)[0].startswith("1 elements were written that are not the kernel's")
    assert "1 of 2" in judge_one(left, answer)[0]
    out[1] = 1.1
    assert "the largest error" in judge_one(out, answer)[0]


def test_rows_that_see_no_key_have_minus_infinity_and_nothing_else_has():
    exact = torch.tensor([0.5, -math.inf], dtype=torch.float64)
    answer = {"o": Exact(torch.zeros(1), 1.0, 1.0), "lse": Exact(exact, 1e-3, logarithms=True)}
    right = torch.tensor([0.5, -math.inf])
    assert judge({"o": torch.zeros(1), "lse": right}, answer)[0] == ""
    for wrong in ([0.5, 0.0], [-math.inf, -math.inf], [0.5, math.inf]):
        assert "must be -inf" in judge({"o": torch.zeros(1), "lse": torch.tensor(wrong)}, answer)[0]


def small_change(buffers):
    buffers["o"][4] += 2**-9


def reads_its_surroundings(buffers, run):
    if before(buffers, "q") != BANDS[0]:
        small_change(buffers)


def remembers(buffers, run):
    if run:
        small_change(buffers)


def drifts(buffers, run):
    buffers["o"][4] = run * 2**-9


@pytest.mark.parametrize(
    "spoil, sentence",
    [
        (reads_its_surroundings, "change with the bytes outside the buffers: the kernel reads out of bounds"),
        (remembers, "not the same in every launch on the same inputs: the kernel remembers its launches"),
        (drifts, "two runs on the same inputs differ in 1 outputs: a race, or a kernel that remembers"),
    ],
)
def test_runs_that_differ_are_told_apart(spoil, sentence):
    result, _ = checked(spoil, repeat=True)
    assert not result.passed and sentence in result.reason


class Unordered(Kernel):
    """Sums up O in any order."""

    def unordered(self, problem):
        return ("o",)


@pytest.mark.parametrize("value, sentence", [(2**-9, ""), (30.0, "in a second run, the largest error is")])
def test_sums_in_any_order_are_judged_in_both_runs(value, sentence):
    def later(buffers, run):
        buffers["o"][4] += run * value

    result, _ = run_case(Backend(later), Unordered(), CASE, repeat=True)
    assert result.passed == (not sentence) and sentence in result.reason
    exact, _ = run_case(Backend(lambda buffers, run: buffers["lse"].add_(run * 1e-6)), Unordered(), CASE, repeat=True)
    assert "differ in" in exact.reason  # the other outputs are the same bits


def test_how_far_sums_in_another_order_may_be_apart():
    one = {"o": torch.tensor([1.0, 2.0, float("nan")]), "lse": torch.tensor([1.0])}
    near = {"o": one["o"] + torch.tensor([1e-5, 0, 0]), "lse": torch.tensor([1.0])}
    assert apart(one, near, ("o",)) == 3  # nothing is near where the largest is no number
    one["o"][2] = near["o"][2] = 0
    assert apart(one, near, ("o",)) == 0 and apart(one, near, ()) == 1
    near["o"][1] = 2.1
    assert apart(one, near, ("o",)) == 1


def test_every_run_starts_from_poison_between_bands():
    seen = []

    def look(buffers, run):
        seen.append((int(before(buffers, "v")), buffers["turns_zeroed"].tolist()))

    checked(look, repeat=True)
    assert seen == [(band, [0] * 8) for band in BANDS] and GUARD_BYTES >= 4096


def test_a_check_is_one_run_unless_two_are_asked_for_and_says_how_long_it_took():
    for words, runs in ((), 1), ((True,), 2):
        backend, started = Backend(lambda buffers, run: None), time.perf_counter()
        result = check(backend, Kernel(), CASE, *words)
        assert backend.runs == runs and result.passed
        assert 0 < result.seconds <= time.perf_counter() - started
