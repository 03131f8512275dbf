"""Expressions that Python's own arithmetic makes of numbers that are not known."""

import math

import pytest

from evoattn.model.symbol import Either, Number, as_one, first, least, merged, outcomes

A, B = Number("a"), Number("b")


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (math.ceil(A / 64) * B, "ceil_div(a, 64) * b"),
        (A - (B - 1), "a - (b - 1)"),
        (-1 * (A + 0) + sum((A, B)), "a * -1 + a + b"),
        (A * B // B + A // A, "a + 1"),
        (3 - A, "3 - a"),
        (1 << (A - 1).bit_length(), "1 << bit_length(a - 1)"),
        (first((A, 0, -1), lambda n: B % n == 0 and n < 9, 1),
         "first(a, 0, -1, [&](int64_t n) { return floor_mod(b, n) == 0 && n < 9; }, 1)"),
    ],
)  # fmt: skip
def test_texts(made, text):
    assert made.text({}) == text


def test_ways_become_one():
    assert merged(outcomes(lambda: max(A, 2 * B))).text({}) == "larger(a, b * 2)"
    assert merged(outcomes(lambda: (least(A, B), "same"))) == (Number("smaller", B, A), "same")
    assert merged(outcomes(lambda: not A > 3)).text({}) == "3 >= a"


def test_ways_that_differ_in_more_stay_apart():
    assert merged(outcomes(lambda: "none" if A == B else "some")) == Either(Number("==", A, B), "none", "some")


def test_a_function_that_is_one_adds_no_ways():
    asked = []

    def run():
        asked.append(0)
        return sum(as_one(max)(A, n * B) for n in range(1, 9))

    assert isinstance(merged(outcomes(run)), Number) and len(asked) == 1


def test_outside_nothing_is_known():
    with pytest.raises(TypeError, match="a < b"):
        min(B, A)
    assert first((8, 0, -2), lambda n: 12 % n == 0, 1) == 6
