"""Plain statements of the instructions on whole numbers, bits, predicates and comparisons."""

from __future__ import annotations

import itertools

import numpy as np

from tests.ptx.statement import WHOLE, Statement, Table, each, low_bits

SIGNED_WORDS = ("eq", "ne", "lt", "le", "gt", "ge")
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def quotient(a: int, b: int) -> int:
    """Towards zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def arithmetic(kind: str) -> Table:
    bits = int(kind[1:])
    two = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul.lo": lambda a, b: a * b,
        "mul.hi": lambda a, b: a * b >> bits,
        "min": min,
        "max": max,
    }
    three = {"mad.lo": lambda a, b, c: a * b + c, "mad.hi": lambda a, b, c: (a * b >> bits) + c}
    one = {"neg": lambda a: -a, "abs": abs} if kind[0] == "s" else {}
    table = {
        f"{op}.{kind}": Statement((kind,) * count, kind, each(formula, kind))
        for count, group in ((1, one), (2, two), (3, three))
        for op, formula in group.items()
    }
    for op, formula in (("div", quotient), ("rem", lambda a, b: a - b * quotient(a, b))):
        table[f"{op}.{kind}"] = Statement((kind, kind), kind, each(formula, kind), how={"nonzero": True})
    table[f"shr.{kind}"] = Statement((kind, "u32"), kind, each(lambda a, n: a >> min(n, 64), kind))
    if bits < 64:
        double = f"{kind[0]}{2 * bits}"
        table[f"mul.wide.{kind}"] = Statement((kind, kind), double, each(lambda a, b: a * b, double))
        table[f"mad.wide.{kind}"] = Statement((kind, kind, double), double, each(lambda a, b, c: a * b + c, double))
    return table


def of_32_bits() -> Table:
    table = {}
    for kind in ("u32", "s32"):
        low = lambda v, kind=kind: low_bits(v, f"{kind[0]}24")
        table[f"mul24.lo.{kind}"] = Statement((kind,) * 2, kind, each(lambda a, b, low=low: low(a) * low(b), kind))
        table[f"mad24.lo.{kind}"] = Statement(
            (kind,) * 3, kind, each(lambda a, b, c, low=low: low(a) * low(b) + c, kind)
        )
        table[f"sad.{kind}"] = Statement((kind,) * 3, kind, each(lambda a, b, c: abs(a - b) + c, kind))
    for op, formula in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b)):
        clamped = each(lambda a, b, formula=formula: max(-(2**31), min(2**31 - 1, formula(a, b))), "s32")
        table[f"{op}.sat.s32"] = Statement(("s32", "s32"), "s32", clamped)
    for direction, mode in itertools.product("lr", ("wrap", "clamp")):

        def shifted(low, high, n, direction=direction, mode=mode):
            n, both = n & 31 if mode == "wrap" else min(n, 32), high << 32 | low
            return both << n >> 32 if direction == "l" else both >> n

        table[f"shf.{direction}.{mode}.b32"] = Statement(("b32", "b32", "u32"), "b32", each(shifted, "u32"))
    for mode in ("clamp", "wrap"):
        limit = (lambda n: min(n, 32)) if mode == "clamp" else (lambda n: n & 31)
        masked = each(lambda start, count, limit=limit: (1 << limit(count)) - 1 << limit(start), "u32")
        table[f"bmsk.{mode}.b32"] = Statement(("u32", "u32"), "b32", masked)
    for code in (0x80, 0x96, 0xE8, 0xCA):

        def looked_up(a, b, c, code=code):
            return sum((code >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))

        table[f"lop3.b32, {code}"] = Statement(
            ("b32",) * 3, "b32", each(looked_up, "u32"), program=f"lop3.b32 %d, %x0, %x1, %x2, {code};"
        )
    table["prmt.b32"] = Statement(("b32",) * 3, "b32", each(permuted, "u32"))
    return table


def permuted(a: int, b: int, selector: int) -> int:
    """Each nibble of the selector picks a byte of {b, a}, or with its top bit that byte's sign eight times."""
    octets = (b << 32 | a).to_bytes(8, "little")
    nibbles = [selector >> 4 * i & 15 for i in range(4)]
    return int.from_bytes(bytes((octets[n & 7] >> 7) * 255 if n & 8 else octets[n] for n in nibbles), "little")


def extracted(a: int, start: int, count: int, bits: int, signed: bool) -> int:
    """Bit by bit, as the PTX ISA writes bfe."""
    sign = a >> min(start + count - 1, bits - 1) & 1 if signed and count else 0
    return sum((a >> start + i & 1 if i < count and start + i < bits else sign) << i for i in range(bits))


def inserted(a: int, b: int, start: int, count: int, bits: int) -> int:
    for i in range(min(count, max(bits - start, 0))):
        b = b & ~(1 << start + i) | (a >> i & 1) << start + i
    return b


def bitwise(kind: str) -> Table:
    bits, unsigned = int(kind[1:]), kind.replace("b", "u")
    one = {"not": lambda a: ~a, "cnot": lambda a: a == 0}
    two = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}
    table = {
        f"{op}.{kind}": Statement((kind,) * count, kind, each(formula, unsigned))
        for count, group in ((1, one), (2, two))
        for op, formula in group.items()
    }
    table[f"shl.{kind}"] = Statement((kind, "u32"), kind, each(lambda a, n: a << min(n, bits), unsigned))
    table[f"shr.{kind}"] = Statement((kind, "u32"), kind, each(lambda a, n: a >> min(n, bits), unsigned))
    if bits == 16:
        return table
    counts = {
        f"popc.{kind}": int.bit_count,
        f"clz.{kind}": lambda a: bits - a.bit_length(),
        f"bfind.{unsigned}": lambda a: a.bit_length() - 1,
    }
    table |= {opcode: Statement((kind,), "u32", each(formula, "u32")) for opcode, formula in counts.items()}
    table[f"brev.{kind}"] = Statement((kind,), kind, each(lambda a: int(f"{a:0{bits}b}"[::-1], 2), unsigned))
    reach = 255 if bits == 32 else 2**32 - 1  # an H100 takes positions and lengths in 64-bit words whole
    for t in (unsigned, f"s{bits}"):
        field = each(lambda a, s, n, t=t: extracted(a % 2**bits, s & reach, n & reach, bits, t[0] == "s"), t)
        table[f"bfe.{t}"] = Statement((t, "u32", "u32"), t, field)
    table[f"bfi.{kind}"] = Statement(
        (kind, kind, "u32", "u32"), kind, each(lambda a, b, s, n: inserted(a, b, s & reach, n & reach, bits), unsigned)
    )
    return table


def chosen(condition: str, holds, kinds: tuple[str, ...], **options) -> Statement:
    """1 where the instructions `condition` set %p0, else 0."""
    return Statement(
        kinds, "u32", lambda *v: holds(*v).astype(np.uint32), program=f"{condition} selp.u32 %d, 1, 0, %p0;", **options
    )


def holds(word: str, real: bool):
    """A NaN fails every ordered comparison, `ne` too, and passes every `…u`."""

    def compare(a, b):
        nan = np.isnan(a) | np.isnan(b) if real else np.zeros(len(a), np.bool_)
        if word in ("num", "nan"):
            return nan if word == "nan" else ~nan
        return COMPARE[word[:2]](a, b) & ~nan if len(word) == 2 else COMPARE[word[:2]](a, b) | nan

    return compare


def comparisons() -> Table:
    table = {}
    words = {
        "b": ("eq", "ne"),
        "u": tuple(COMPARE),
        "s": SIGNED_WORDS,
        "f": (*SIGNED_WORDS, *(f"{word}u" for word in SIGNED_WORDS), "num", "nan"),
    }
    for kind in (*WHOLE, "b16", "b32", "b64", "f16", "bf16", "f32", "f64"):
        real = kind in ("f16", "bf16", "f32", "f64")
        for word in words["f" if real else kind[0]]:
            table[f"setp.{word}.{kind}"] = chosen(
                f"setp.{word}.{kind} %p0, %x0, %x1;", holds(word, real), (kind, kind), reals=real
            )
            if word not in ("eq", "lt", "geu"):
                continue
            compare = holds(word, real)
            for result, yes in (("u32", 2**32 - 1), ("s32", -1), ("f32", 1.0)):
                number = lambda a, b, c=compare, yes=yes: np.where(c(a, b), yes, 0)
                table[f"set.{word}.{result}.{kind}"] = Statement((kind, kind), result, number, reals=real)
    tiny = lambda a, b: (np.where(np.abs(v) < 2.0**-126, 0, v) for v in (a, b))
    table["setp.lt.ftz.f32"] = chosen(
        "setp.lt.ftz.f32 %p0, %x0, %x1;", lambda a, b: np.less(*tiny(a, b)), ("f32",) * 2, reals=True
    )
    table["set.gt.ftz.u32.f32"] = Statement(
        ("f32", "f32"), "u32", lambda a, b: np.where(np.greater(*tiny(a, b)), 2**32 - 1, 0), reals=True
    )
    for word, combine in COMBINE.items():
        both = lambda a, b, combine=combine: combine(a < b, a % 2 == 1) + 2 * combine(a >= b, a % 2 == 1)
        odd = "and.b32 %r0, %x0, 1; setp.eq.u32 %p2, %r0, 1;"
        program = f"{odd} setp.lt.{word}.s32 %p0|%p1, %x0, %x1, %p2; selp.u32 %d, 1, 0, %p0; @%p1 add.u32 %d, %d, 2;"
        table[f"setp.lt.{word}.s32"] = Statement(("s32", "s32"), "u32", both, program=program)
        table[f"{word}.pred"] = chosen(
            f"{odd} setp.lt.s32 %p1, %x0, %x1; {word}.pred %p0, %p1, %p2;",
            lambda a, b, combine=combine: combine(a < b, a % 2 == 1),
            ("s32", "s32"),
        )
    table["not.pred"] = chosen("setp.lt.s32 %p1, %x0, %x1; not.pred %p0, %p1;", lambda a, b: a >= b, ("s32", "s32"))
    table["mov.pred"] = chosen("setp.lt.s32 %p1, %x0, %x1; mov.pred %p0, %p1;", lambda a, b: a < b, ("s32", "s32"))
    return table


def moves() -> Table:
    table = {}
    for kind in (*WHOLE, "b16", "b32", "b64", "f32", "f64"):
        table[f"mov.{kind}"] = Statement((kind,), kind, lambda a: a)
        table[f"selp.{kind}"] = Statement(
            (kind, kind, "u32"),
            kind,
            lambda a, b, c: np.where(c % 2 == 1, a, b),
            program=(f"and.b32 %r0, %x2, 1; setp.eq.u32 %p0, %r0, 1; selp.{kind} %d, %x0, %x1, %p0;"),
        )
    return table


def between_widths() -> Table:
    """cvt of whole numbers: the source's bits, cut, extended or clamped."""
    table, narrow = {}, ("u8", "s8")
    for to, source in itertools.product((*WHOLE, *narrow), repeat=2):
        if to == source or (to in narrow and source in narrow):
            continue
        register = source if source not in narrow else "u32"
        value = lambda v, source=source: low_bits(v, source)
        table[f"cvt.{to}.{source}"] = Statement((register,), to if to not in narrow else f"{to[0]}32", each(value, to))
        least, most = (
            (-(1 << int(to[1:]) - 1), (1 << int(to[1:]) - 1) - 1) if to[0] == "s" else (0, (1 << int(to[1:])) - 1)
        )
        if source[1:] != "64":
            clamped = each(lambda v, value=value, least=least, most=most: max(least, min(most, value(v))), to)
            table[f"cvt.sat.{to}.{source}"] = Statement((register,), to if to not in narrow else f"{to[0]}32", clamped)
    return table


TABLE: Table = of_32_bits() | comparisons() | moves() | between_widths()
for _kind in WHOLE:
    TABLE |= arithmetic(_kind)
for _kind in ("b16", "b32", "b64"):
    TABLE |= bitwise(_kind)
