"""Forms of operands: numbers in the text, registers that are read and written, halves of registers, predicates that are
negated or come in pairs; and what an approximation is exact or coarse for. What instructions compute, an H100 has
said (`test_golden.py`)."""

import numpy as np
import pytest

from tests.ptx.golden.harness import evaluate

COMPARE = {"lt": np.less, "ge": np.greater_equal, "hi": np.greater, "lo": np.less, "ne": np.not_equal}


def operand(kind: str, seed: int) -> np.ndarray:
    """Values of a whole number's PTX type: its edges among random ones."""
    dtype, rng = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}"), np.random.default_rng(seed)
    limits = np.iinfo(dtype)
    edges = np.array([0, 1, 2, 31, 32, 33, limits.min, limits.max, limits.max - 1], dtype)
    return rng.permutation(np.concatenate([edges, rng.integers(limits.min, limits.max, 87, dtype, endpoint=True)]))


WORDS = [operand("u32", seed) for seed in range(2)]


def permuted(a: int, b: int, selector: int) -> int:
    """Each nibble of the selector picks a byte of {b, a}, or with its top bit that byte's sign eight times."""
    octets = (b << 32 | a).to_bytes(8, "little")
    nibbles = [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(bytes((octets[n & 7] >> 7) * 255 if n & 8 else octets[n] for n in nibbles), "little")


def check(statement, expected, *inputs, result="u4"):
    """`expected` of the operands as Python numbers, modulo the width of the result, for every thread."""
    got = evaluate(statement, result, *inputs)
    answers = [expected(*values) for values in zip(*(i.tolist() for i in inputs))]
    assert got.view(f"u{got.itemsize}").tolist() == [answer % (1 << 8 * got.itemsize) for answer in answers]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_a_shift_by_a_number_that_is_the_width(bits):
    signed, unsigned = (operand(f"{kind}{bits}", 3) for kind in "su")
    check(f"shr.s{bits} %d, %x0, {bits};", lambda a: a >> bits, signed, result=f"i{bits // 8}")
    check(f"shl.b{bits} %d, %x0, {bits};", lambda a: 0, unsigned, result=f"u{bits // 8}")


@pytest.mark.parametrize("selector", [0x5410, 0x7632, 0xB3A2])
def test_bytes_chosen_by_a_number(selector):
    check(f"prmt.b32 %d, %x0, %x1, {selector};", lambda a, b: permuted(a, b, selector), *WORDS)


def test_bytes_of_two_numbers_chosen_by_a_register():
    check("prmt.b32 %d, 0x64748494, 0x11a2b3c4, %x0;", lambda s: permuted(0x64748494, 0x11A2B3C4, s & 0xFFFF), WORDS[0])


def test_a_register_is_read_before_it_is_written():
    check("prmt.b32 %x0, %x0, %x1, 0x1054; mov.b32 %d, %x0;", lambda a, b: permuted(a, b, 0x1054), *WORDS)


def test_halves_of_registers_change_places():
    check("mov.b32 {%h0, %h1}, %x0; mov.b32 %d, {%h1, %h0};", lambda a: a << 16 | a >> 16, WORDS[0])
    long = operand("u64", 5)
    check("mov.b64 {%r0, %r1}, %x0; mov.b64 %d, {%r1, %r0};", lambda a: a << 32 | a >> 32, long, result="u8")


@pytest.mark.parametrize("word, kind", [("lt", "s32"), ("ge", "s32"), ("hi", "u32"), ("lo", "u32"), ("ne", "b32")])
def test_a_comparison_with_a_negated_predicate_gives_two(word, kind):
    program = f"""
setp.gt.s32 %p1, %x0, 5; setp.{word}.and.{kind} %p0|%p2, %x0, %x1, !%p1;
selp.u32 %d, 1, 0, %p0; @%p2 add.u32 %d, %d, 2;"""
    a, b = (operand("s32", seed) for seed in (1, 2))
    holds = COMPARE[word](a.view("u4"), b.view("u4")) if kind == "u32" else COMPARE[word](a, b)
    assert np.array_equal(evaluate(program, "u4", a, b), np.where(a <= 5, np.where(holds, 1, 2), 0))


def test_a_float_in_the_text():
    body = "mul.f32 %f0, %x0, 0f40490FDB; neg.f32 %f0, %f0; abs.f32 %f1, %f0; copysign.f32 %d, %x0, %f1;"
    assert evaluate(body, "f4", np.float32([1, -2])).tolist() == [np.float32(np.pi), -2 * np.float32(np.pi)]


def test_powers_of_two_are_exact_and_flushed_only_where_that_is_said():
    powers = np.float32([-127, -np.inf, 3, -1])
    assert evaluate("ex2.approx.ftz.f32 %d, %x0;", "f4", powers).tolist() == [0, 0, 8, 0.5]
    assert evaluate("ex2.approx.f32 %d, %x0;", "f4", powers).tolist() == [2.0**-127, 0, 8, 0.5]


def test_an_approximate_tanh_is_as_coarse_as_a_gpus():
    rng = np.random.default_rng(5)
    some = rng.standard_normal(128) * np.exp2(rng.integers(-12, 12, 128))
    x = np.float32([*some, 0, np.inf, -np.inf, np.nan])
    got, exact = evaluate("tanh.approx.f32 %d, %x0;", "f4", x), np.tanh(x.astype(np.float64))
    np.testing.assert_allclose(got, exact, rtol=2.0**-16.9)
    assert np.nanmax(np.abs(got - exact)) > 2.0**-19
    assert np.isnan(evaluate("tanh.approx.f32 %d, %x0;", "f4", np.uint32([0x7FFFFFFF]).view(np.float32))).all()
