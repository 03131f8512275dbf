"""Integer instructions against plain statements about Python's whole numbers."""

import numpy as np
import pytest

from tests.ptx.golden.harness import evaluate

EDGES = [0, 1, 2, 3, 5, 31, 32, 33, 127, 128, 255, 256] + [
    2**bits - below for bits in (15, 16, 31, 32, 63, 64) for below in (0, 1)
]


def numbers(dtype: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    bits = np.dtype(dtype).itemsize * 8
    values = [e & (2**bits - 1) for e in EDGES] + [
        int(x) >> (64 - bits) >> int(s)
        for x, s in zip(
            rng.integers(0, 2**64, count - len(EDGES), np.uint64), rng.integers(0, bits, count - len(EDGES))
        )
    ]
    rng.shuffle(values)
    return np.array(values, f"u{bits // 8}").view(dtype)


def check(statement, result, dtypes, expected, count=512):
    """`expected` of the operands as Python numbers, modulo the width of the result, for every lane."""
    inputs = [numbers(dtype, count, seed) for seed, dtype in enumerate(dtypes)]
    got = evaluate(statement, result, *inputs)
    bits = got.itemsize * 8
    for values, answer in zip(zip(*(i.tolist() for i in inputs)), got.view(f"u{bits // 8}").tolist()):
        assert answer == expected(*values) & (2**bits - 1), (statement, values)


def truncated(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


@pytest.mark.parametrize(
    "name, dtype", [("u16", "u2"), ("s16", "i2"), ("u32", "u4"), ("s32", "i4"), ("u64", "u8"), ("s64", "i8")]
)
def test_arithmetic(name, dtype):
    bits = 8 * np.dtype(dtype).itemsize
    check(f"add.{name} %d, %x0, %x1;", dtype, [dtype] * 2, lambda a, b: a + b)
    check(f"sub.{name} %d, %x0, %x1;", dtype, [dtype] * 2, lambda a, b: a - b)
    check(f"min.{name} %d, %x0, %x1;", dtype, [dtype] * 2, min)
    check(f"max.{name} %d, %x0, %x1;", dtype, [dtype] * 2, max)
    check(f"mul.lo.{name} %d, %x0, %x1;", dtype, [dtype] * 2, lambda a, b: a * b)
    check(f"mul.hi.{name} %d, %x0, %x1;", dtype, [dtype] * 2, lambda a, b: a * b >> bits)
    check(f"mad.lo.{name} %d, %x0, %x1, %x2;", dtype, [dtype] * 3, lambda a, b, c: a * b + c)
    check(f"or.b{bits} %x1, %x1, 1; div.{name} %d, %x0, %x1;", dtype, [dtype] * 2, lambda a, b: truncated(a, b | 1))
    check(
        f"or.b{bits} %x1, %x1, 1; rem.{name} %d, %x0, %x1;",
        dtype,
        [dtype] * 2,
        lambda a, b: a - (b | 1) * truncated(a, b | 1),
    )


@pytest.mark.parametrize(
    "name, dtype, wide", [("u16", "u2", "u4"), ("s16", "i2", "i4"), ("u32", "u4", "u8"), ("s32", "i4", "i8")]
)
def test_wide_products(name, dtype, wide):
    check(f"mul.wide.{name} %d, %x0, %x1;", wide, [dtype] * 2, lambda a, b: a * b)
    check(f"mad.wide.{name} %d, %x0, %x1, %x2;", wide, [dtype, dtype, wide], lambda a, b, c: a * b + c)


def test_other_products():
    check("mad.hi.s32 %d, %x0, %x1, %x2;", "i4", ["i4"] * 3, lambda a, b, c: (a * b >> 32) + c)
    check("mul24.lo.u32 %d, %x0, %x1;", "u4", ["u4"] * 2, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF))
    check("add.sat.s32 %d, %x0, %x1;", "i4", ["i4"] * 2, lambda a, b: max(-(2**31), min(2**31 - 1, a + b)))
    check("sad.u32 %d, %x0, %x1, %x2;", "u4", ["u4"] * 3, lambda a, b, c: abs(a - b) + c)
    check("neg.s32 %d, %x0;", "i4", ["i4"], lambda a: -a)
    check("abs.s64 %d, %x0;", "i8", ["i8"], abs)


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_logic_and_shifts(bits):
    u, s = f"u{bits // 8}", f"i{bits // 8}"
    check(f"xor.b{bits} %d, %x0, %x1; not.b{bits} %d, %d;", u, [u, u], lambda a, b: ~(a ^ b))
    check(f"and.b{bits} %d, %x0, %x1; or.b{bits} %d, %d, %x2;", u, [u] * 3, lambda a, b, c: a & b | c)
    check(f"shl.b{bits} %d, %x0, %x1;", u, [u, "u4"], lambda a, n: a << min(n, 99))
    check(f"shr.u{bits} %d, %x0, %x1;", u, [u, "u4"], lambda a, n: a >> min(n, 99))
    check(f"shr.s{bits} %d, %x0, %x1;", s, [s, "u4"], lambda a, n: a >> min(n, 99))
    check(f"shr.s{bits} %d, %x0, {bits};", s, [s], lambda a: a >> bits)
    check(f"shl.b{bits} %d, %x0, {bits};", u, [u], lambda a: 0)


def test_funnel_shift():
    check("shf.l.wrap.b32 %d, %x0, %x1, %x2;", "u4", ["u4"] * 3, lambda lo, hi, n: ((hi << 32 | lo) << (n & 31)) >> 32)
    check("shf.r.clamp.b32 %d, %x0, %x1, %x2;", "u4", ["u4"] * 3, lambda lo, hi, n: (hi << 32 | lo) >> min(n, 32))


def field(a, start, count, bits, signed):
    """Bit by bit, as the PTX ISA writes bfe."""
    sign = 0 if count == 0 or not signed else a >> min(start + count - 1, bits - 1) & 1
    return sum((a >> start + i & 1 if i < count and start + i < bits else sign) << i for i in range(bits))


@pytest.mark.parametrize("name, dtype", [("u32", "u4"), ("s32", "u4"), ("u64", "u8"), ("s64", "u8")])
def test_bit_fields(name, dtype):
    bits = int(name[1:])
    small = "and.b32 %x1, %x1, 67; and.b32 %x2, %x2, 71;"
    signed = name[0] == "s"
    extract = f"{small} bfe.{name} %d, %x0, %x1, %x2;"
    check(extract, dtype, [dtype, "u4", "u4"], lambda a, s, n: field(a, s & 67, n & 71, bits, signed))
    reach = 255 if bits == 32 else 2**32 - 1  # an H100 takes positions and lengths in 64-bit words whole
    check(
        f"bfe.{name} %d, %x0, %x1, %x2;",
        dtype,
        [dtype, "u4", "u4"],
        lambda a, s, n: field(a, s & reach, n & reach, bits, signed),
    )
    if not signed:
        insertion = f"bfi.b{bits} %d, %x0, %x1, %x2, %x3;"
        check(insertion, dtype, [dtype, dtype, "u4", "u4"], lambda a, b, s, n: insert(a, b, s & reach, n & reach, bits))


def insert(a, b, start, count, bits=32):
    for i in range(min(count, bits)):
        if start + i < bits:
            b = b & ~(1 << start + i) | (a >> i & 1) << start + i
    return b


def test_bits():
    small = "and.b32 %x2, %x2, 35; and.b32 %x3, %x3, 39;"
    check(f"{small} bfi.b32 %d, %x0, %x1, %x2, %x3;", "u4", ["u4"] * 4, lambda a, b, s, n: insert(a, b, s & 35, n & 39))
    check("popc.b32 %d, %x0;", "u4", ["u4"], int.bit_count)
    check("clz.b32 %d, %x0;", "u4", ["u4"], lambda a: 32 - a.bit_length())
    check("clz.b64 %d, %x0;", "u4", ["u8"], lambda a: 64 - a.bit_length())
    check("bfind.u32 %d, %x0;", "u4", ["u4"], lambda a: a.bit_length() - 1)
    check("brev.b32 %d, %x0;", "u4", ["u4"], lambda a: int(f"{a:032b}"[::-1], 2))
    for table in (0x96, 0xE8, 0x3C, 0x01):
        check(
            f"lop3.b32 %d, %x0, %x1, %x2, {table};",
            "u4",
            ["u4"] * 3,
            lambda a, b, c, table=table: sum(
                (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32)
            ),
        )


def permuted(a, b, selector):
    octets = (b << 32 | a).to_bytes(8, "little")
    out = []
    for i in range(4):
        nibble = selector >> 4 * i & 15
        octet = octets[nibble & 7]
        out.append((0xFF if octet & 0x80 else 0) if nibble & 8 else octet)
    return int.from_bytes(bytes(out), "little")


def test_byte_permutation():
    check("prmt.b32 %d, %x0, %x1, %x2;", "u4", ["u4"] * 3, permuted)
    for selector in (0x5410, 0x7632, 0xB3A2):
        check(
            f"prmt.b32 %d, %x0, %x1, {selector};",
            "u4",
            ["u4"] * 2,
            lambda a, b, selector=selector: permuted(a, b, selector),
        )
    check("prmt.b32 %x0, %x0, %x1, 0x1054; mov.b32 %d, %x0;", "u4", ["u4"] * 2, lambda a, b: permuted(a, b, 0x1054))


def test_packing():
    check("mov.b32 {%h0, %h1}, %x0; mov.b32 %d, {%h1, %h0};", "u4", ["u4"], lambda a: a << 16 | a >> 16)
    check("mov.b64 {%r0, %r1}, %x0; mov.b64 %d, {%r1, %r0};", "u8", ["u8"], lambda a: a << 32 | a >> 32)


@pytest.mark.parametrize(
    "to, source, result, dtype",
    [
        ("s32", "s16", "i4", "i2"),
        ("u32", "u8", "u4", "u4"),
        ("s32", "s8", "i4", "u4"),
        ("u16", "u32", "u2", "u4"),
        ("s64", "s32", "i8", "i4"),
        ("u64", "u32", "u8", "u4"),
        ("u32", "u64", "u4", "u8"),
        ("s8", "s32", "i4", "i4"),
    ],
)
def test_conversions_between_widths(to, source, result, dtype):
    bits, kept = int(source[1:]), int(to[1:])

    def signed(value, width, kind):
        value &= 2**width - 1
        return value - 2**width if kind == "s" and value >> (width - 1) else value

    check(f"cvt.{to}.{source} %d, %x0;", result, [dtype], lambda a: signed(signed(a, bits, source[0]), kept, to[0]))


def test_saturating_conversion():
    check("cvt.sat.u8.s32 %d, %x0;", "u4", ["i4"], lambda a: max(0, min(255, a)))
    check("cvt.sat.s16.s32 %d, %x0;", "i4", ["i4"], lambda a: max(-32768, min(32767, a)))


@pytest.mark.parametrize(
    "compare, holds",
    [
        ("lt.s32", lambda a, b: a < b),
        ("ge.s32", lambda a, b: a >= b),
        ("hi.u32", lambda a, b: a % 2**32 > b % 2**32),
        ("lo.u32", lambda a, b: a % 2**32 < b % 2**32),
        ("ne.b32", lambda a, b: a != b),
    ],
)
def test_comparisons(compare, holds):
    check(
        f"setp.{compare} %p0, %x0, %x1; selp.b32 %d, 7, %x0, %p0;",
        "i4",
        ["i4"] * 2,
        lambda a, b: 7 if holds(a, b) else a,
    )
    both = f"""
setp.gt.s32 %p1, %x0, 5; setp.{compare[:2]}.and.{compare[3:]} %p0|%p2, %x0, %x1, !%p1;
selp.u32 %d, 1, 0, %p0; @%p2 add.u32 %d, %d, 2;"""
    check(both, "u4", ["i4"] * 2, lambda a, b: (holds(a, b) and a <= 5) + 2 * (not holds(a, b) and a <= 5))
