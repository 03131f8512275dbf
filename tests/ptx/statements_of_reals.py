"""Plain statements of the instructions on floats, halves and pairs of halves, and of the conversions from and to
them.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import torch

from tests.ptx.golden.operands import F32_EDGES, TAME, result_type
from tests.ptx.statement import FORMATS, WHOLE, Statement, Table, bits_of, dressed, flushed, low_bits, nearest, once

ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
HALVES = ("f16", "f16x2", "bf16", "bf16x2")
EDGELESS = {"edges": TAME}
CANCELLING = {"edges": [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.25] * 8}
ZEROS = {"edges": [0.0, -0.0] * 16 + F32_EDGES}
"""Drawn so often that two of them meet in most rounds."""


def real(count: int, kind: str, formula, words: str = "", **options) -> Statement:
    return Statement((kind,) * count, kind, dressed(formula, kind, words), reals=True, **options)


def smaller(a, b):
    """-0 lies below +0; a NaN loses to a number."""
    first = (a < b) | (a == b) & np.signbit(a) | np.isnan(b)
    return np.where(first, a, b)


def larger(a, b):
    return np.where((a > b) | (a == b) & ~np.signbit(a) | np.isnan(b), a, b)


def strict(choose):
    """With `.NaN` a NaN wins."""
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), np.nan, choose(a, b))


def rounded_down(a: float, b: float) -> float:
    """The largest float32 not above the exact sum; -0 for a cancellation."""
    exact = Fraction(a) + Fraction(b)
    if not exact:
        return -0.0 if math.copysign(1, a) != math.copysign(1, b) else a
    total = nearest(exact, "f32")
    return float(np.nextafter(np.float32(total), np.float32(-np.inf))) if total > exact else total


def arithmetic(kind: str) -> Table:
    """Rounded once, which is what `.rn` means, and what flushes, clamps or chooses."""
    sums = {"f32": ("", ".rn", ".ftz", ".sat", ".rn.ftz.sat"), "f64": ("", ".rn")}
    few = sums.get(kind, ("", ".rn") if kind[0] == "b" else ("", ".rn", ".ftz", ".sat"))
    table = {}
    for (op, formula), words in itertools.product(
        {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b}.items(), few
    ):
        table[f"{op}{words}.{kind}"] = real(2, kind, once(formula, kind), words)
    of_halves = ("", ".relu") if kind[0] == "b" else ("", ".ftz", ".sat", ".relu")
    fused = {"f32": ("", ".ftz", ".sat", ".ftz.sat"), "f64": ("",)}.get(kind, of_halves)
    for op, words in itertools.product(("fma.rn", "mad.rn", "mad") if kind == "f32" else ("fma.rn",), fused):
        table[f"{op}{words}.{kind}"] = real(3, kind, once(lambda a, b, c: a * b + c, kind), words)
    flushes = ("", ".ftz") if kind in ("f32", "f16", "f16x2") else ("",)
    for words in flushes:
        table[f"neg{words}.{kind}"], table[f"abs{words}.{kind}"] = (
            real(1, kind, np.negative, words),
            real(1, kind, np.abs, words),
        )
        for op, choose in (("min", smaller), ("max", larger)):
            table[f"{op}{words}.{kind}"] = real(2, kind, choose, words, how=ZEROS)
            table[f"{op}{words}.NaN.{kind}"] = real(2, kind, strict(choose), words, how=ZEROS)
    return table


def of_one_or_two_words(kind: str) -> Table:
    """Of float32 and float64 alone. Quotients and roots in float64 lie too far from a tie of float32 for a second
    rounding to matter.
    """
    table, as_kind = {f"copysign.{kind}": real(2, kind, lambda a, b: np.copysign(b, a))}, result_type(kind)
    for words in ("", ".ftz") if kind == "f32" else ("",):
        for op, count, formula in (("div", 2, np.divide), ("rcp", 1, np.reciprocal), ("sqrt", 1, np.sqrt)):
            cast = lambda *v, formula=formula: formula(*v).astype(as_kind).astype(np.float64)
            table[f"{op}.rn{words}.{kind}"] = real(count, kind, cast, words)
    for test, holds in (
        ("finite", np.isfinite),
        ("infinite", np.isinf),
        ("notanumber", np.isnan),
        ("number", lambda a: ~np.isnan(a)),
    ):
        table[f"testp.{test}.{kind}"] = Statement(
            (kind,),
            "u32",
            lambda a, holds=holds: holds(a).astype(np.uint32),
            reals=True,
            program=f"testp.{test}.{kind} %p0, %x0; selp.u32 %d, 1, 0, %p0;",
        )
    return table


def approximations() -> Table:
    """Within what the PTX ISA allows or less; sines of angles that its bound is for."""

    def single(formula):
        return lambda *v: formula(*v).astype(np.float32).astype(np.float64)

    table, close = {}, {"relative": 2.0**-21, "absolute": 2.0**-126}
    functions = {
        "ex2": np.exp2,
        "lg2": np.log2,
        "rsqrt": lambda a: 1 / np.sqrt(a),
        "rcp": np.reciprocal,
        "sqrt": np.sqrt,
    }
    for (op, formula), words in itertools.product(functions.items(), ("", ".ftz")):
        bound = {"relative": 2.0**-21, "absolute": 2.0**-21} if op == "lg2" else close
        table[f"{op}.approx{words}.f32"] = real(1, "f32", single(formula), words, **bound)
    for (op, formula), words in itertools.product((("sin", np.sin), ("cos", np.cos)), ("", ".ftz")):
        table[f"{op}.approx{words}.f32"] = real(
            1, "f32", single(formula), words, how={"edges": TAME, "spread": 1.0}, absolute=2.0**-20
        )
    for op, words in itertools.product(("approx", "full"), ("", ".ftz")):
        table[f"div.{op}{words}.f32"] = real(2, "f32", single(np.divide), words, how=EDGELESS, **close)
    table["tanh.approx.f32"] = real(1, "f32", np.tanh, relative=2.0**-11, absolute=2.0**-126)
    for kind in HALVES:
        digits, lowest = FORMATS[bits_of(kind)]
        near = {"relative": 2.0 ** (1 - digits), "absolute": 2.0 ** (lowest - digits + 1)}
        words = ".ftz" if kind[0] == "b" else ""
        for op, formula in ((f"ex2.approx{words}", np.exp2), ("tanh.approx", np.tanh)):
            rounded = lambda a, formula=formula, kind=kind: once(lambda v: v, kind)(formula(a))
            table[f"{op}.{kind}"] = real(1, kind, rounded, words if "ex2" in op else "", **near)
    return table


def to_whole(values: np.ndarray, kind: str, source: str) -> np.ndarray:
    """Whole or infinite floats or NaN as a type holds them: clamped; NaN is 0, in or from 64 bits the top bit alone (as
    on an H100).
    """
    bits, signed = int(kind[1:]), kind[0] == "s"
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    nan = low_bits(1 << bits - 1, kind) if 64 in (bits, int(source.removeprefix("b")[1:])) else 0
    register = result_type(kind if bits > 8 else f"{kind[0]}32")
    return np.array(
        [nan if math.isnan(v) else most if v >= most else least if v <= least else int(v) for v in values.tolist()],
        register,
    )


def conversions() -> Table:
    table, narrow = {}, {"u8": "u32", "s8": "s32"}
    for (mode, rounding), to in itertools.product(ROUNDINGS.items(), (*WHOLE, *narrow)):
        for source, words in (("f32", ""), ("f32", ".ftz"), ("f32", ".sat"), ("f16", ""), ("bf16", ""), ("f64", "")):
            if (source != "f32" and mode != "rzi") or (words and to != "s32"):
                continue
            of = lambda a, to=to, rounding=rounding, source=source, words=words: to_whole(
                rounding(flushed(a, "f32") if words == ".ftz" else a), to, source
            )
            table[f"cvt.{mode}{words}.{to}.{source}"] = Statement((source,), narrow.get(to, to), of, reals=True)
        for words in ("", ".ftz", ".sat"):
            table[f"cvt.{mode}{words}.f32.f32"] = real(1, "f32", rounding, words)
    for to, source in itertools.product(("f16", "bf16", "f32", "f64"), (*WHOLE, *narrow)):
        if to in ("f16", "bf16") and source[1:] == "64":
            continue  # neither ptxas nor the interpreter takes it
        exact = lambda a, to=to, source=source: once(lambda v: v, to)(
            np.array([low_bits(v, source) for v in a.tolist()], object)
        )
        table[f"cvt.rn.{to}.{source}"] = Statement((narrow.get(source, source),), to, exact, reals=True)
    for words, to, source in (
        ("", "f32", "f16"),
        ("", "f32", "bf16"),
        ("", "f64", "f32"),
        (".ftz", "f32", "f16"),
        (".sat", "f32", "f16"),
        (".sat", "f32", "f32"),
        (".ftz.sat", "f32", "f32"),
        (".rn", "f32", "f64"),
        (".rn.ftz", "f32", "f64"),
        (".rn", "f16", "f64"),
    ):
        finish = dressed(lambda a: a, "f32", words)
        table[f"cvt{words}.{to}.{source}"] = Statement(
            (source,), to, lambda a, f=finish, to=to: f(once(lambda v: v, to)(a)), reals=True
        )
    for mode, relu, to in itertools.product(("rn", "rz"), ("", ".relu"), ("f16", "bf16")):
        cut = dressed(once(lambda v: v, to, truncate=mode == "rz"), to, relu)
        table[f"cvt.{mode}{relu}.{to}.f32"] = Statement(("f32",), to, cut, reals=True)
        pair = lambda high, low, cut=cut: np.stack([cut(low), cut(high)], 1)
        table[f"cvt.{mode}{relu}.{to}x2.f32"] = Statement(("f32", "f32"), f"{to}x2", pair, reals=True)
    for kind in EIGHT_BITS:
        both = lambda high, low, kind=kind: eight_bits(high, kind) << 8 | eight_bits(low, kind)
        table[f"cvt.rn.satfinite.{kind}x2.f32"] = Statement(("f32", "f32"), "u16", both, reals=True)
        halves = lambda pair, both=both: both(pair[:, 1], pair[:, 0])
        table[f"cvt.rn.satfinite.{kind}x2.f16x2"] = Statement(("f16x2",), "u16", halves, reals=True)
        values = lambda pair, kind=kind: np.stack([of_eight_bits(pair & 255, kind), of_eight_bits(pair >> 8, kind)], 1)
        table[f"cvt.rn.f16x2.{kind}x2"] = Statement(("u16",), "f16x2", values, reals=True)
    table["cvt.rna.tf32.f32"] = Statement(("f32",), "f32", away_from_zero, reals=True)
    return table


EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def of_eight_bits(codes: np.ndarray, kind: str) -> np.ndarray:
    return torch.from_numpy(codes.astype(np.uint8)).view(EIGHT_BITS[kind]).double().numpy()


def eight_bits(values: np.ndarray, kind: str) -> np.ndarray:
    """As torch rounds, what is too large to the largest number."""
    most = torch.finfo(EIGHT_BITS[kind]).max
    codes = torch.from_numpy(values.astype(np.float32)).clamp(-most, most).to(EIGHT_BITS[kind]).view(torch.uint8)
    return np.where(np.isnan(values), 0x7F, codes.numpy()).astype(np.uint16)


def away_from_zero(values: np.ndarray) -> np.ndarray:
    """To 11 binary digits of float32's range, a tie away from zero."""
    _, exponents = np.frexp(np.where(np.isfinite(values), values, 0))
    steps = np.exp2(np.maximum(exponents - 1, -126) - 10.0)
    return np.copysign(np.floor(np.abs(values) / steps + 0.5) * steps, values).astype(np.float32).astype(np.float64)


TABLE: Table = approximations() | conversions()
TABLE["add.rm.f32"] = real(2, "f32", np.vectorize(rounded_down, otypes=[np.float64]), how=CANCELLING)
for _kind in ("f32", "f64", *HALVES):
    TABLE |= arithmetic(_kind)
for _kind in ("f32", "f64"):
    TABLE |= of_one_or_two_words(_kind)
