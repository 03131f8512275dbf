"""Floating-point instructions: single roundings against exact fractions, NaN, infinities, saturation, flushing."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ptx.golden.harness import evaluate

FLOATS = np.float32(
    [0.0, -0.0, 1, -1.5, 3.25, 1e-3, 65504, 65520, 7e4, -7e4, 1e30, -3e38, 1e-40, -1e-45, np.inf, -np.inf, np.nan]
)
PAIRS = [x.reshape(-1).copy() for x in np.meshgrid(FLOATS, FLOATS)]


def same(got: np.ndarray, expected: np.ndarray) -> bool:
    return np.array_equal(got, expected, equal_nan=True)


def round_fraction(value: Fraction, mantissa: int, lowest: int) -> float:
    """The nearest number with `mantissa` bits after the point and the exponent at least `lowest`; ties to even. No
    overflow.
    """
    if value == 0:
        return 0.0
    exponent = abs(value).numerator.bit_length() - abs(value).denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, lowest) - mantissa)
    return float(round(value / step) * step)


def random_floats(count, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * scale * np.exp2(rng.integers(-12, 12, count))).astype(np.float32)


def test_fma_rounds_once():
    a, b = random_floats(256, 0), random_floats(256, 1)
    c = (-(a.astype(np.float64) * b) * (1 + np.random.default_rng(2).choice([0, 2.0**-24, 2.0**-30], 256))).astype(
        np.float32
    )  # cancels
    got = evaluate("fma.rn.f32 %d, %x0, %x1, %x2;", "f4", a, b, c)
    for x, y, z, result in zip(*(v.tolist() for v in (a, b, c, got))):
        assert result == round_fraction(Fraction(x) * Fraction(y) + Fraction(z), 23, -126)


@pytest.mark.parametrize("kind, mantissa, lowest", [("f16", 10, -14), ("bf16", 7, -126)])
@pytest.mark.parametrize("packed", [False, True])
def test_half_arithmetic_rounds_once(kind, mantissa, lowest, packed):
    """Operands made exactly representable, in both halves of a pair; the results against exact fractions."""
    raw = [random_floats(512, seed) / 16 for seed in range(3)]
    bits = [evaluate(f"cvt.rn.{kind}.f32 %d, %x0;", "u2", r) for r in raw]
    values = [[round_fraction(Fraction(v), mantissa, lowest) for v in r.tolist()] for r in raw]
    inputs = [b.view(np.uint32) for b in bits] if packed else bits
    result, suffix = ("u4", kind + "x2") if packed else ("u2", kind)
    exact = {
        "add": lambda a, b, c: a + b,
        "mul": lambda a, b, c: a * b,
        "fma.rn": lambda a, b, c: a * b + c,
        "min": lambda a, b, c: min(a, b),
    }
    for op, compute in exact.items():
        operands = "%x0, %x1, %x2" if op == "fma.rn" else "%x0, %x1"
        got = evaluate(f"{op}.{suffix} %d, {operands};", result, *inputs).view(np.uint16)
        expected = [round_fraction(compute(*map(Fraction, v)), mantissa, lowest) for v in zip(*values)]
        decoded = (
            got.view(np.float16).astype(np.float64) if kind == "f16" else (got.astype(np.uint32) << 16).view(np.float32)
        ).tolist()
        assert decoded == expected, op


@settings(max_examples=25)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=32))
def test_bf16_from_any_float(bits):
    x = np.array(bits, np.uint32).view(np.float32)
    low = evaluate("cvt.rn.bf16.f32 %d, %x0;", "u2", x)
    pair = evaluate("cvt.rn.bf16x2.f32 %d, %x1, %x0;", "u4", x, -x)
    assert np.array_equal(pair & 0xFFFF, low)
    for value, result in zip(x.tolist(), ((low.astype(np.uint32) << 16).view(np.float32)).tolist()):
        if np.isfinite(value) and abs(value) < 3.38e38:
            assert result == round_fraction(Fraction(value), 7, -126)
        else:
            assert np.isnan(result) if np.isnan(value) else abs(result) >= 3.38e38


def test_half_conversions():
    with np.errstate(over="ignore"):
        assert same(evaluate("cvt.rn.f16.f32 %d, %x0;", "f2", FLOATS), FLOATS.astype(np.float16))
    truncated = evaluate(
        "cvt.rz.f16.f32 %d, %x0;", "f2", np.array([1 + 2**-10 - 2**-20, -1 - 2**-11 - 2**-12, 0.1], np.float32)
    )
    assert truncated.tolist() == [1.0, -1.0, 0.0999755859375]
    every = np.arange(65536, dtype=np.uint16)
    assert same(
        evaluate("cvt.f32.f16 %d, %x0;", "f4", every[:4096].copy()), every[:4096].view(np.float16).astype(np.float32)
    )
    packed = evaluate("cvt.rn.f16x2.f32 %d, %x0, %x1;", "u4", np.float32([1, 2]), np.float32([3, 4])).view(np.float16)
    assert packed.tolist() == [3, 1, 4, 2]  # the first source is the upper half
    assert evaluate("cvt.rn.relu.f16.f32 %d, %x0;", "f2", np.float32([-2, 2])).tolist() == [0, 2]
    tf32 = evaluate("cvt.rna.tf32.f32 %d, %x0;", "f4", np.float32([1 + 2**-11, 1 + 2**-12, -1 - 2**-11]))
    assert tf32.tolist() == [1 + 2**-10, 1.0, -1 - 2**-10]


def test_minimum_and_maximum_of_nan():
    a, b = PAIRS
    assert same(evaluate("max.f32 %d, %x0, %x1;", "f4", a, b), np.fmax(a, b))
    assert same(evaluate("min.f32 %d, %x0, %x1;", "f4", a, b), np.fmin(a, b))
    assert same(
        evaluate("max.NaN.f32 %d, %x0, %x1;", "f4", a, b),
        np.where(np.isnan(a) | np.isnan(b), np.nan, np.fmax(a, b)).astype("f4"),
    )


@pytest.mark.parametrize(
    "compare, ordered",
    [
        ("eq", np.equal),
        ("ne", np.not_equal),
        ("lt", np.less),
        ("le", np.less_equal),
        ("gt", np.greater),
        ("ge", np.greater_equal),
    ],
)
def test_ordered_and_unordered_comparisons(compare, ordered):
    a, b = PAIRS
    nan = np.isnan(a) | np.isnan(b)
    plain, unordered = (
        evaluate(f"setp.{c}.f32 %p0, %x0, %x1; selp.u32 %d, 1, 0, %p0;", "u4", a, b) for c in (compare, compare + "u")
    )
    assert np.array_equal(plain, ordered(a, b) & ~nan)
    assert np.array_equal(unordered, ordered(a, b) | nan)


def test_flush_and_saturate():
    a, b = PAIRS
    tiny = lambda x: np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)
    with np.errstate(all="ignore"):
        assert same(evaluate("mul.ftz.f32 %d, %x0, %x1;", "f4", a, b), tiny(tiny(a) * tiny(b)))
        assert same(evaluate("add.f32 %d, %x0, %x1;", "f4", a, b), a + b)
        assert same(evaluate("add.sat.f32 %d, %x0, %x1;", "f4", a, b), np.nan_to_num(np.clip(a + b, 0, 1)))
    assert evaluate("ex2.approx.ftz.f32 %d, %x0;", "f4", np.float32([-127, -np.inf, 3, -1])).tolist() == [0, 0, 8, 0.5]
    assert evaluate("ex2.approx.f32 %d, %x0;", "f4", np.float32([-127])).tolist() == [2.0**-127]


def test_float_to_integer_saturates():
    got = evaluate("cvt.rni.s32.f32 %d, %x0;", "i4", np.float32([2.5, 3.5, -2.5, 3e9, -3e9, np.nan, np.inf, -np.inf]))
    assert got.tolist() == [2, 4, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1, -(2**31)]
    assert evaluate("cvt.rzi.u32.f32 %d, %x0;", "u4", np.float32([2.9, -1, 5e9, 4e9])).tolist() == [
        2,
        0,
        2**32 - 1,
        4 * 10**9,
    ]
    assert evaluate("cvt.rmi.s32.f32 %d, %x0;", "i4", np.float32([-1.5, 1.5])).tolist() == [-2, 1]
    assert evaluate("cvt.rpi.f32.f32 %d, %x0;", "f4", np.float32([-1.5, 1.2])).tolist() == [-1, 2]


def test_integer_to_float():
    x = np.array([0, 1, 16777217, 2**31 - 1, 2**32 - 1], np.uint32)
    assert evaluate("cvt.rn.f32.u32 %d, %x0;", "f4", x).tolist() == x.astype(np.float32).tolist()
    assert evaluate("cvt.rn.f32.s32 %d, %x0;", "f4", x).tolist() == x.view(np.int32).astype(np.float32).tolist()


@pytest.mark.parametrize(
    "op, exact",
    [
        ("rcp.approx.f32", lambda x: 1 / x),
        ("rsqrt.approx.f32", lambda x: 1 / np.sqrt(x)),
        ("sqrt.rn.f32", np.sqrt),
        ("lg2.approx.f32", np.log2),
        ("ex2.approx.f32", np.exp2),
    ],
)
def test_special_functions(op, exact):
    x = np.abs(random_floats(128, 5)) + np.float32(0.01)
    x = np.minimum(x, 100).astype(np.float32)
    np.testing.assert_allclose(evaluate(f"{op} %d, %x0;", "f4", x), exact(x.astype(np.float64)), rtol=3e-7, atol=1e-7)


def test_an_approximate_tanh_is_as_coarse_as_a_gpus():
    x = np.concatenate([random_floats(128, 5), np.float32([0, np.inf, -np.inf, np.nan])])
    got, exact = evaluate("tanh.approx.f32 %d, %x0;", "f4", x), np.tanh(x.astype(np.float64))
    np.testing.assert_allclose(got, exact, rtol=2.0**-16.9)
    assert np.nanmax(np.abs(got - exact)) > 2.0**-19
    assert np.isnan(evaluate("tanh.approx.f32 %d, %x0;", "f4", np.uint32([0x7FFFFFFF]).view(np.float32))).all()


def test_constants_and_copies():
    body = "mul.f32 %f0, %x0, 0f40490FDB; neg.f32 %f0, %f0; abs.f32 %f1, %f0; copysign.f32 %d, %x0, %f1;"
    got = evaluate(body, "f4", np.float32([1, -2]))
    assert got.tolist() == [np.float32(np.pi), -2 * np.float32(np.pi)]
