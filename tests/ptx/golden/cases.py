"""Small launches that together run every word of the interpreter's whitelist: one instruction on edge and random
values.

Each thread has a result. What needs a program is in `programs.py`.

`python -m tests.ptx.golden collect` runs them (and the launches of `tests/ptx`) on the interpreter, `… run` on a GPU.
"""

import itertools
from typing import Any

import numpy as np

from tests.ptx.golden.harness import evaluate
from tests.ptx.golden.operands import F32_EDGES, TAME, operand, result_type


def plain(opcode: str, result: str, *kinds: str, extra: str = "", **how: Any) -> None:
    """`opcode %d, %x0, …` with operands of `kinds`, then `extra`."""
    inputs = [operand(kind, 7 * i + 1, **how) for i, kind in enumerate(kinds)]
    names = ", ".join(["%d", *(f"%x{i}" for i in range(len(kinds)))])
    evaluate(f"{opcode} {names}{extra};", result_type(result), *inputs)


def predicate(opcode: str, *kinds: str, after: str = "", **how: Any) -> None:
    """An instruction that writes %p0, and perhaps `after` it more; 1 or 0 per thread, plus 2 for %p1."""
    inputs = [operand(kind, 7 * i + 1, **how) for i, kind in enumerate(kinds)]
    names = ", ".join(f"%x{i}" for i in range(len(kinds)))
    evaluate(
        f"setp.ne.u32 %p1, %i, %i; setp.gt.u32 %p2, %i, 40; {opcode.replace('OPERANDS', names)}; {after} selp.b32 %d, "
        "1, 0, %p0; "
        "selp.b32 %r0, 2, 0, %p1; or.b32 %d, %d, %r0;",
        np.uint32,
        *inputs,
    )


def integer_cases() -> None:
    for t in ("u16", "u32", "u64", "s16", "s32", "s64"):
        for op in ("add", "sub", "min", "max", "mul.lo", "mul.hi"):
            plain(f"{op}.{t}", t, t, t)
        for op in ("div", "rem"):
            plain(f"{op}.{t}", t, t, t, nonzero=True)
        for op in ("mad.lo", "mad.hi"):
            plain(f"{op}.{t}", t, t, t, t)
        plain(f"shr.{t}", t, t, "u32")
        if t[0] == "s":
            plain(f"neg.{t}", t, t)
            plain(f"abs.{t}", t, t)
        if t[1:] != "64":
            wide = f"{t[0]}{2 * int(t[1:])}"
            plain(f"mul.wide.{t}", wide, t, t)
            plain(f"mad.wide.{t}", wide, t, t, wide)
    for t in ("u32", "s32"):
        plain(f"mul24.lo.{t}", t, t, t)
        plain(f"mad24.lo.{t}", t, t, t, t)
        plain(f"sad.{t}", t, t, t, t)
    plain("add.sat.s32", "s32", "s32", "s32")
    plain("sub.sat.s32", "s32", "s32", "s32")


def bit_cases() -> None:
    for t in ("b16", "b32", "b64"):
        for op in ("and", "or", "xor"):
            plain(f"{op}.{t}", t, t, t)
        plain(f"not.{t}", t, t)
        plain(f"cnot.{t}", t, t)
        plain(f"shl.{t}", t, t, "u32")
        plain(f"shr.{t}", t, t, "u32")
    for direction, mode in itertools.product("lr", ("wrap", "clamp")):
        plain(f"shf.{direction}.{mode}.b32", "b32", "b32", "b32", "u32")
    for t in ("u32", "s32", "u64", "s64"):
        plain(f"bfe.{t}", t, t, "u32", "u32")
    for t in ("b32", "b64"):
        plain(f"bfi.{t}", t, t, t, "u32", "u32")
        plain(f"brev.{t}", t, t)
        plain(f"popc.{t}", "u32", t)
        plain(f"clz.{t}", "u32", t)
        plain(f"bfind.{t.replace('b', 'u')}", "u32", t)
    for mode in ("clamp", "wrap"):
        plain(f"bmsk.{mode}.b32", "b32", "u32", "u32")
    for table in (0x80, 0xFE, 0x96, 0xE8, 0xCA, 0x3C):
        plain("lop3.b32", "b32", "b32", "b32", "b32", extra=f", {table}")
    plain("prmt.b32", "b32", "b32", "b32", "b32")
    for t in ("b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64"):
        plain(f"mov.{t}", t, t)
        evaluate(f"setp.gt.u32 %p0, %i, 30; selp.{t} %d, %x0, %x1, %p0;", result_type(t), operand(t, 1), operand(t, 2))
    for op in ("and", "or", "xor"):
        predicate(f"setp.lt.s32 %p3, OPERANDS; {op}.pred %p0, %p3, %p2", "s32", "s32")
    predicate("setp.lt.s32 %p3, OPERANDS; not.pred %p0, %p3; mov.pred %p1, %p3", "s32", "s32")


def comparison_cases() -> None:
    for t in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64"):
        words = (
            ("eq", "ne")
            if t[0] == "b"
            else ("eq", "ne", "lt", "le", "gt", "ge", *(("lo", "ls", "hi", "hs") if t[0] == "u" else ()))
        )
        for word in words:
            predicate(f"setp.{word}.{t} %p0|%p1, OPERANDS", t, t)
    for t in ("f32", "f64", "f16", "bf16"):
        for word in ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"):
            predicate(f"setp.{word}.{t} %p0, OPERANDS", t, t)
    for combine in ("and", "or", "xor"):
        predicate(f"setp.lt.{combine}.ftz.f32 %p0, OPERANDS, %p2", "f32", "f32")
        predicate(f"setp.ge.{combine}.s32 %p0|%p1, OPERANDS, !%p2", "s32", "s32")
    for result in ("u32", "s32", "f32"):
        for word, t in (("lt", "f32"), ("leu", "f64"), ("gt", "s32"), ("eq", "b32"), ("hi", "u16"), ("ge", "s64")):
            plain(f"set.{word}.{result}.{t}", result, t, t)
    for word in ("lt", "ne", "nan"):
        plain(f"set.{word}.ftz.u32.f32", "u32", "f32", "f32")
    for test, t in itertools.product(("finite", "infinite", "number", "notanumber"), ("f32", "f64")):
        predicate(f"testp.{test}.{t} %p0, OPERANDS", t)


def float_cases() -> None:
    for op, words in itertools.product(("add", "sub", "mul"), ("", ".rn", ".ftz", ".sat", ".rn.ftz.sat")):
        plain(f"{op}{words}.f32", "f32", "f32", "f32")
    for op in ("add", "sub", "mul", "add.rn", "min", "max", "copysign", "div.rn"):
        plain(f"{op}.f64", "f64", "f64", "f64")
    plain("add.rm.f32", "f32", "f32", "f32", edges=TAME)
    for op, words in itertools.product(("min", "max"), ("", ".ftz", ".NaN", ".ftz.NaN")):
        plain(f"{op}{words}.f32", "f32", "f32", "f32")
    plain("copysign.f32", "f32", "f32", "f32")
    for op in ("neg", "abs"):
        plain(f"{op}.f32", "f32", "f32")
        plain(f"{op}.ftz.f32", "f32", "f32")
        plain(f"{op}.f64", "f64", "f64")
    for op in ("fma.rn", "mad.rn"):
        for words in ("", ".ftz", ".sat", ".ftz.sat"):
            plain(f"{op}{words}.f32", "f32", "f32", "f32", "f32")
    plain("fma.rn.f64", "f64", "f64", "f64", "f64")
    for words in (".rn", ".approx", ".full", ".rn.ftz", ".approx.ftz", ".full.ftz"):
        plain(f"div{words}.f32", "f32", "f32", "f32", edges=F32_EDGES if ".rn" in words else TAME)
    for op in ("rcp", "sqrt"):
        plain(f"{op}.rn.f32", "f32", "f32")
        plain(f"{op}.rn.ftz.f32", "f32", "f32")
        plain(f"{op}.rn.f64", "f64", "f64")
        plain(f"{op}.approx.f32", "f32", "f32", edges=TAME)
        plain(f"{op}.approx.ftz.f32", "f32", "f32", edges=TAME)
    for op in ("ex2", "lg2", "rsqrt", "sin", "cos"):
        spread = 1.0 if op in ("sin", "cos") else 4.0
        for words in ("", ".ftz"):
            plain(
                f"{op}.approx{words}.f32",
                "f32",
                "f32",
                edges=TAME if op in ("sin", "cos") else [*TAME, np.inf, -np.inf, np.nan],
                spread=spread,
            )
    plain("tanh.approx.f32", "f32", "f32", edges=[*TAME, np.inf, -np.inf])


def half_cases() -> None:
    for op, words, t in itertools.product(("add", "sub", "mul"), ("", ".rn", ".ftz", ".sat"), ("f16", "f16x2")):
        plain(f"{op}{words}.{t}", t, t, t)
    for op, words, t in itertools.product(("add", "sub", "mul"), ("", ".rn"), ("bf16", "bf16x2")):
        plain(f"{op}{words}.{t}", t, t, t)
    for words, t in itertools.product(("", ".ftz", ".sat", ".relu"), ("f16", "f16x2")):
        plain(f"fma.rn{words}.{t}", t, t, t, t)
    for words, t in itertools.product(("", ".relu"), ("bf16", "bf16x2")):
        plain(f"fma.rn{words}.{t}", t, t, t, t)
    for t in ("f16", "f16x2", "bf16", "bf16x2"):
        for op, words in itertools.product(("min", "max"), ("", ".NaN", *((".ftz",) if t[0] == "f" else ()))):
            plain(f"{op}{words}.{t}", t, t, t)
        plain(f"neg.{t}", t, t)
        plain(f"abs.{t}", t, t)
        plain(f"tanh.approx.{t}", t, t)
        plain(f"ex2.approx{'.ftz' if t[0] == 'b' else ''}.{t}", t, t)
    for t in ("f16", "f16x2"):
        plain(f"neg.ftz.{t}", t, t)
        plain(f"abs.ftz.{t}", t, t)


def conversion_cases() -> None:
    whole = ("u16", "s16", "u32", "s32", "u64", "s64")
    for to, source in itertools.product(whole, whole):
        if to != source:
            plain(f"cvt.{to}.{source}", to, source)
        low, high = np.iinfo(result_type(source)).min, np.iinfo(result_type(source)).max
        if (
            int(source[1:]) < 64 and not np.iinfo(result_type(to)).min <= low <= high <= np.iinfo(result_type(to)).max
        ):  # else ptxas takes no .sat
            plain(f"cvt.sat.{to}.{source}", to, source)
    for t in ("u8", "s8"):  # in a wider register: the result extended, the source cut
        plain(f"cvt.{t}.u32", f"{t[0]}32", "u32")
        plain(f"cvt.s32.{t}", "s32", "u32")
        plain(f"cvt.sat.{t}.s32", f"{t[0]}32", "s32")
        plain(f"cvt.rni.{t}.f32", f"{t[0]}32", "f32")
        plain(f"cvt.rn.f32.{t}", "f32", "u32")
    for mode, to in itertools.product(("rni", "rzi", "rmi", "rpi"), whole):
        plain(f"cvt.{mode}.{to}.f32", to, "f32")
    for to, source in itertools.product(("s32", "u64"), ("f16", "bf16", "f64")):
        plain(f"cvt.rzi.{to}.{source}", to, source)
    plain("cvt.rzi.ftz.s32.f32", "s32", "f32")
    plain("cvt.rni.sat.s32.f32", "s32", "f32")
    for source, to in itertools.product(whole, ("f32", "f64")):
        plain(f"cvt.rn.{to}.{source}", to, source)
    for source in ("u16", "s16", "u32", "s32"):
        plain(f"cvt.rn.f16.{source}", "f16", source)
        plain(f"cvt.rn.bf16.{source}", "bf16", source)
    for words, to, source in (
        ("", "f32", "f16"),
        ("", "f32", "bf16"),
        ("", "f64", "f32"),
        (".ftz", "f32", "f16"),
        (".sat", "f32", "f32"),
        (".ftz.sat", "f32", "f32"),
        (".rn", "f32", "f64"),
        (".rn.ftz", "f32", "f64"),
        (".sat", "f32", "f16"),
    ):
        plain(f"cvt{words}.{to}.{source}", to, source)
    for mode, words in itertools.product(("rni", "rzi", "rmi", "rpi"), ("", ".ftz", ".sat")):
        plain(f"cvt.{mode}{words}.f32.f32", "f32", "f32")
    for mode, relu, to in itertools.product(("rn", "rz"), ("", ".relu"), ("f16", "bf16")):
        plain(f"cvt.{mode}{relu}.{to}.f32", to, "f32")
        plain(f"cvt.{mode}{relu}.{to}x2.f32", f"{to}x2", "f32", "f32")
    for t in ("e4m3", "e5m2"):
        plain(f"cvt.rn.f16x2.{t}x2", "f16x2", "u16")
        plain(f"cvt.rn.satfinite.{t}x2.f16x2", "u16", "f16x2")
        plain(f"cvt.rn.satfinite.{t}x2.f32", "u16", "f32", "f32")
    plain("cvt.rn.f16.f64", "f16", "f64")
    plain("cvt.rna.tf32.f32", "b32", "f32")


GROUPS = (integer_cases, bit_cases, comparison_cases, float_cases, half_cases, conversion_cases)
