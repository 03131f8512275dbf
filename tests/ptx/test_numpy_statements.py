"""Arithmetic, bit and conversion instructions against one line of NumPy or Python each, on edges in random company (hypothesis)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from golden_cases import operand, result_type
from ptx_harness import evaluate

Statement = Callable[..., np.ndarray]
WHOLE = ("u16", "s16", "u32", "s32", "u64", "s64")
EXAMPLES = 2


def wide(values: np.ndarray) -> np.ndarray:
    """As whole numbers without a width."""
    return values.astype(object)


def cut(values: np.ndarray, kind: str) -> np.ndarray:
    """Whole numbers modulo the width of a PTX type."""
    bits = int(kind[1:])
    return np.array([v & (1 << bits) - 1 for v in values], f"u{bits // 8}").view(result_type(kind))


def whole(kind: str) -> dict[str, tuple[tuple[str, ...], str, Statement]]:
    """Statement of each instruction on whole numbers of a type, with the types of its operands and of its result."""
    bits = int(kind[1:])

    def exact(count: int, formula: Callable) -> tuple[tuple[str, ...], str, Statement]:
        return (kind,) * count, kind, lambda *v: cut(formula(*map(wide, v)), kind)

    table = {
        f"add.{kind}": exact(2, lambda a, b: a + b), f"sub.{kind}": exact(2, lambda a, b: a - b),
        f"mul.lo.{kind}": exact(2, lambda a, b: a * b), f"mul.hi.{kind}": exact(2, lambda a, b: a * b >> bits),
        f"mad.lo.{kind}": exact(3, lambda a, b, c: a * b + c), f"mad.hi.{kind}": exact(3, lambda a, b, c: (a * b >> bits) + c),
        f"min.{kind}": ((kind,) * 2, kind, np.minimum), f"max.{kind}": ((kind,) * 2, kind, np.maximum),
        f"shr.{kind}": ((kind, "u32"), kind, lambda a, n: cut(wide(a) >> np.minimum(n, 64), kind)),
    }
    if kind[0] == "s":
        table |= {f"neg.{kind}": exact(1, lambda a: -a), f"abs.{kind}": exact(1, abs)}
    if bits < 64:
        double = f"{kind[0]}{2 * bits}"
        table[f"mul.wide.{kind}"] = (kind, kind), double, lambda a, b: cut(wide(a) * wide(b), double)
        table[f"mad.wide.{kind}"] = (kind, kind, double), double, lambda a, b, c: cut(wide(a) * wide(b) + wide(c), double)
    return table


def bitwise(kind: str) -> dict[str, tuple[tuple[str, ...], str, Statement]]:
    bits, word = int(kind[1:]), result_type(kind)
    table = {
        f"and.{kind}": ((kind,) * 2, kind, np.bitwise_and), f"or.{kind}": ((kind,) * 2, kind, np.bitwise_or),
        f"xor.{kind}": ((kind,) * 2, kind, np.bitwise_xor), f"not.{kind}": ((kind,), kind, np.invert),
        f"cnot.{kind}": ((kind,), kind, lambda a: (a == 0).astype(word)),
        f"shl.{kind}": ((kind, "u32"), kind, lambda a, n: cut(wide(a) << wide(np.minimum(n, bits)), kind)),
    }
    if bits > 16:
        unsigned = kind.replace("b", "u")
        table |= {
            f"popc.{kind}": ((kind,), "u32", lambda a: np.array([v.bit_count() for v in a.tolist()], np.uint32)),
            f"clz.{kind}": ((kind,), "u32", lambda a: np.array([bits - v.bit_length() for v in a.tolist()], np.uint32)),
            f"bfind.{unsigned}": ((kind,), "u32", lambda a: np.array([v.bit_length() - 1 for v in a.tolist()]).astype(np.uint32)),
            f"brev.{kind}": ((kind,), kind, lambda a: np.array([int(f"{v:0{bits}b}"[::-1], 2) for v in a.tolist()], word)),
        }
    return table


def real(kind: str) -> dict[str, tuple[tuple[str, ...], str, Statement]]:
    """Rounded once by NumPy, which is what `.rn` means; halves by way of float32, wide enough for one rounding (twice 11 bits and two)."""
    word = result_type(kind)

    def rounded(count: int, formula: Callable) -> tuple[tuple[str, ...], str, Statement]:
        return (kind,) * count, kind, lambda *v: formula(*(x.astype(np.float32) if kind == "f16" else x for x in v)).astype(word)

    table = {f"add.{kind}": rounded(2, np.add), f"sub.{kind}": rounded(2, np.subtract), f"mul.{kind}": rounded(2, np.multiply),
             f"min.{kind}": rounded(2, np.fmin), f"max.{kind}": rounded(2, np.fmax), f"neg.{kind}": rounded(1, np.negative),
             f"abs.{kind}": rounded(1, np.abs)}
    if kind != "f16":
        table |= {f"div.rn.{kind}": rounded(2, np.divide), f"rcp.rn.{kind}": rounded(1, np.reciprocal),
                  f"sqrt.rn.{kind}": rounded(1, np.sqrt), f"copysign.{kind}": rounded(2, lambda a, b: np.copysign(b, a))}
    return table


def to_whole(values: np.ndarray, kind: str) -> np.ndarray:
    """Floats that are whole, or infinite, or NaN, as a type holds them: clamped; NaN is 0, in 64 bits 2^63 (as on an H100)."""
    limits = np.iinfo(result_type(kind))
    nan = 0 if limits.bits < 64 else limits.min or 1 << 63
    return np.array([nan if np.isnan(v) else limits.max if v >= limits.max else limits.min if v <= limits.min else int(v) for v in
                     values.astype(np.float64).tolist()], result_type(kind))


def bfloat_bits(values: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, even on a tie; one NaN for all."""
    bits = values.view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), nearest)


def conversions() -> dict[str, tuple[tuple[str, ...], str, Statement]]:
    table = {}
    for to in WHOLE:
        for source in WHOLE:
            if to != source:
                table[f"cvt.{to}.{source}"] = (source,), to, lambda a, to=to: cut(wide(a), to)
        for mode, rounding in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
            table[f"cvt.{mode}.{to}.f32"] = ("f32",), to, lambda a, to=to, rounding=rounding: to_whole(rounding(a), to)
        table[f"cvt.rn.f64.{to}"] = (to,), "f64", lambda a: np.array([float(v) for v in a.tolist()])
    table["cvt.f32.f16"] = ("f16",), "f32", lambda a: a.astype(np.float32)
    table["cvt.rn.f16.f32"] = ("f32",), "f16", lambda a: a.astype(np.float16)
    table["cvt.rn.f32.f64"] = ("f64",), "f32", lambda a: a.astype(np.float32)
    table["cvt.rn.bf16.f32"] = ("f32",), "bf16", bfloat_bits
    return table


TABLE = {}
for _kind in WHOLE:
    TABLE |= whole(_kind)
for _kind in ("b16", "b32", "b64"):
    TABLE |= bitwise(_kind)
for _kind in ("f16", "f32", "f64"):
    TABLE |= real(_kind)
TABLE |= conversions()


@pytest.mark.parametrize("opcode", TABLE)
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2 ** 20))
def test_it_does_what_numpy_says(opcode, seed):
    kinds, result, statement = TABLE[opcode]
    inputs = [operand(kind, seed + 1009 * i) for i, kind in enumerate(kinds)]
    names = ", ".join(["%d", *(f"%x{i}" for i in range(len(kinds)))])
    with np.errstate(all="ignore"):
        got, expected = evaluate(f"{opcode} {names};", result_type(result), *inputs), statement(*inputs)
    same = got == expected
    if got.dtype.kind == "f":
        same = same & (np.signbit(got) == np.signbit(expected)) | np.isnan(got) & np.isnan(expected)
    at = np.flatnonzero(~same)[:3]
    assert not len(at), (opcode, [i[at] for i in inputs], got[at], expected[at])


COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


@pytest.mark.parametrize("kind", [*WHOLE, "f16", "f32", "f64"])
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2 ** 20))
def test_comparisons(kind, seed):
    """A NaN fails every ordered comparison, `ne` too, and passes every `…u`."""
    a, b = operand(kind, seed), operand(kind, seed + 1009)
    nan = np.isnan(a) | np.isnan(b) if kind[0] == "f" else np.zeros(len(a), np.bool_)
    for word, compare in COMPARISONS.items():
        for suffix, answer in (("", compare(a, b) & ~nan), ("u", compare(a, b) | nan)):
            if suffix == "" or kind[0] == "f":
                got = evaluate(f"setp.{word}{suffix}.{kind} %p0, %x0, %x1; selp.u32 %d, 1, 0, %p0;", np.uint32, a, b)
                assert np.array_equal(got, answer.astype(np.uint32)), (word + suffix, kind)
