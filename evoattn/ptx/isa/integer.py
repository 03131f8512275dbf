"""Integer arithmetic. Results wrap as in hardware; a division by zero gives an unspecified value and no fault."""

from functools import partial

import numpy as np

from evoattn.ptx.isa.dispatch import Fields, Operation, instruction
from evoattn.ptx.program.kernel import Instruction, Lanes, PtxType, parse_type
from evoattn.ptx.state.registers import Binder

WHOLE = r"\.(?P<type>[us](?:16|32|64))"
NARROW = r"\.(?P<type>[us](?:16|32))"
_UFUNCS = {"add": np.add, "sub": np.subtract, "min": np.minimum, "max": np.maximum}


def operands(binder: Binder, ins: Instruction, kind: PtxType) -> tuple[Lanes, ...]:
    """All operands as views of one type: the sources, then the destination."""
    return (*[binder.source(o, kind) for o in ins.operands[1:]], binder.destination(ins.operands[0], kind))


@instruction("add sub min max", WHOLE, kind="int")
def binary(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, d = operands(binder, ins, parse_type(fields["type"]))
    return partial(_UFUNCS[fields["op"]], a, b, out=d)


@instruction("min max", r"\.s16x2", kind="int")
def binary_of_pairs(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, d = (np.atleast_1d(one).view(np.int16) for one in operands(binder, ins, parse_type("b32")))
    return partial(_UFUNCS[fields["op"]], a, b, out=d)


@instruction("neg abs", r"\.(?P<type>s(?:16|32|64))", kind="int")
def unary(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, d = operands(binder, ins, parse_type(fields["type"]))
    return partial(np.negative if fields["op"] == "neg" else np.abs, a, d)


@instruction("add sub", r"\.sat\.(?P<type>s32)", kind="int")
def saturating(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, d = operands(binder, ins, parse_type("s32"))
    combine = np.add if fields["op"] == "add" else np.subtract
    limits = np.iinfo(np.int32)
    return lambda: np.copyto(d, np.clip(combine(a, b, dtype=np.int64), limits.min, limits.max), casting="unsafe")


@instruction("mul", r"\.lo" + WHOLE, kind="int")
def multiply_low(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, d = operands(binder, ins, parse_type(fields["type"]))
    return partial(np.multiply, a, b, d)


def _wide_operands(binder: Binder, ins: Instruction, kind: PtxType) -> tuple[Lanes, Lanes, Lanes]:
    a, b = (binder.source(o, kind) for o in ins.operands[1:3])
    return a, b, binder.destination(ins.operands[0], kind.of_width(2 * kind.bits))


@instruction("mul", r"\.wide" + NARROW, kind="int")
def multiply_wide(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, d = _wide_operands(binder, ins, parse_type(fields["type"]))
    return partial(np.multiply, a, b, d, dtype=d.dtype)


@instruction("mad", r"\.wide" + NARROW, kind="int")
def multiply_add_wide(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    kind = parse_type(fields["type"])
    a, b, d = _wide_operands(binder, ins, kind)
    c = binder.source(ins.operands[3], kind.of_width(2 * kind.bits))
    product = binder.scratch(d.dtype)

    def run() -> None:
        np.multiply(a, b, product, dtype=product.dtype)
        np.add(product, c, d)

    return run


@instruction("mad", r"\.lo" + WHOLE, kind="int")
def multiply_add_low(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, c, d = operands(binder, ins, parse_type(fields["type"]))
    product = binder.scratch(d.dtype)

    def run() -> None:
        np.multiply(a, b, product)
        np.add(product, c, d)

    return run


def _high_product(a: Lanes, b: Lanes) -> Lanes:
    """Upper half of the exact product of two integer arrays of one type."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = np.multiply(a, b, dtype=np.int64 if a.dtype.kind == "i" else np.uint64)
        upper: Lanes = (wide >> wide.dtype.type(bits)).astype(a.dtype)
        return upper
    x, y = a.view(np.uint64), b.view(np.uint64)
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    x0, x1, y0, y1 = x & low, x >> half, y & low, y >> half
    middle = x1 * y0 + (x0 * y0 >> half)
    high = x1 * y1 + (middle >> half) + ((x0 * y1 + (middle & low)) >> half)
    if a.dtype.kind == "i":  # a negative factor was read as itself + 2^64
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    signed: Lanes = high.view(a.dtype)
    return signed


@instruction("mul", r"\.hi" + WHOLE, kind="int")
def multiply_high(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, d = operands(binder, ins, parse_type(fields["type"]))
    return lambda: np.copyto(d, _high_product(a, b))


@instruction("mad", r"\.hi" + WHOLE, kind="int")
def multiply_add_high(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, c, d = operands(binder, ins, parse_type(fields["type"]))
    return lambda: np.add(_high_product(a, b), c, d)


def _low_24(a: Lanes) -> Lanes:
    """The low 24 bits, sign- or zero-extended to 64."""
    return (a.astype(np.int64) << 40) >> 40 if a.dtype.kind == "i" else (a & np.uint32(0xFFFFFF)).astype(np.int64)


@instruction("mul24 mad24", r"\.lo\.(?P<type>[us]32)", kind="int")
def multiply_24(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, *c, d = operands(binder, ins, parse_type(fields["type"]))
    return lambda: np.copyto(d, _low_24(a) * _low_24(b) + (c[0].astype(np.int64) if c else 0), casting="unsafe")


def _divide(a: Lanes, b: Lanes) -> Lanes:
    """Quotient rounded towards zero."""
    quotient: Lanes = np.floor_divide(a, b)
    if a.dtype.kind == "i":
        quotient = quotient + (((a < 0) != (b < 0)) & (quotient * b != a))
    return quotient


@instruction("div", WHOLE, kind="int")
def divide(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, d = operands(binder, ins, parse_type(fields["type"]))
    return lambda: np.copyto(d, _divide(a, b))


@instruction("rem", WHOLE, kind="int")
def remainder(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, d = operands(binder, ins, parse_type(fields["type"]))
    return partial(np.fmod, a, b, d)


@instruction("sad", r"\.(?P<type>[us]32)", kind="int")
def sum_of_absolute_difference(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, c, d = operands(binder, ins, parse_type(fields["type"]))
    return lambda: np.copyto(d, np.abs(a.astype(np.int64) - b.astype(np.int64)) + c, casting="unsafe")
