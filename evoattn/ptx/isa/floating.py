"""Floating-point arithmetic in float32 and float64: rounded once to nearest even, `.ftz` flushing subnormal operands
and results."""

from collections.abc import Callable
from functools import partial

import numpy as np

from evoattn.ptx.errors import unsupported
from evoattn.ptx.isa.dispatch import Fields, Operation, instruction
from evoattn.ptx.isa.integer import operands
from evoattn.ptx.program.kernel import Instruction, Lanes, PtxType, parse_type
from evoattn.ptx.state.registers import Binder

_ROUNDED = r"(?:\.rn)?(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.(?P<type>f32|f64)"
_BINARY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
Extreme = Callable[..., Lanes]
"""`(a, b, out=None)`."""
SMALLEST_NORMAL = np.float32(2.0**-126)


def flush(values: Lanes) -> Lanes:
    """Subnormal float32 → zero of the same sign."""
    small = np.abs(values) < SMALLEST_NORMAL
    if not np.count_nonzero(small):  # as of most
        return values
    return np.where(small, np.copysign(np.float32(0), values), values)


def finish(compute: Callable[..., object], sources: tuple[Lanes, ...], d: Lanes, fields: Fields) -> Operation:
    """`compute(*sources, out=d)` with what `.ftz` and `.sat` ask for around it. Saturation takes NaN to 0."""
    ftz, sat = fields.get("ftz"), fields.get("sat")
    if not ftz and not sat:
        return partial(compute, *sources, out=d)
    result = np.empty_like(d)

    def run() -> None:
        compute(*(flush(s) for s in sources) if ftz else sources, out=result)
        value = flush(result) if ftz else result
        if sat:
            value = np.fmin(np.fmax(value, d.dtype.type(0)), d.dtype.type(1))
        np.copyto(d, value)

    return run


def zeros_in_order(choose: np.ufunc) -> Extreme:
    """NumPy's minimum or maximum with -0 below +0, as the PTX ISA has them: NumPy takes either, by the length of the
    array."""
    sign = -1 if choose in (np.fmin, np.minimum) else 1

    def run(a: Lanes, b: Lanes, out: Lanes | None = None) -> Lanes:
        tied = a == 0
        tied &= b == 0
        result: Lanes
        if not np.count_nonzero(tied):
            result = choose(a, b, out=out)
            return result
        result = np.where(tied, sign * (sign * a + sign * b), choose(a, b))  # a sum of zeros is -0 only if both are
        if out is not None:
            np.copyto(out, result)
        return result

    return run


LOSING_NAN: dict[str, Extreme] = {"min": zeros_in_order(np.fmin), "max": zeros_in_order(np.fmax)}
"""A NaN operand loses to a number."""
KEEPING_NAN: dict[str, Extreme] = {"min": zeros_in_order(np.minimum), "max": zeros_in_order(np.maximum)}


@instruction("add sub mul", _ROUNDED, kind="fp32")
def binary(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, d = operands(binder, ins, _type(ins, fields))
    return finish(_BINARY[fields["op"]], (a, b), d, fields)


@instruction("add", r"\.rm\.(?P<type>f32)", kind="fp32")
def add_rounded_down(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """The nearest sum, or its lower neighbour if that lies above the exact one: Knuth's two-sum tells the error
    exactly.

    A sum of zero is -0 unless both operands are +0 (IEEE 754, rounding towards negative infinity)."""
    a, b, d = operands(binder, ins, _type(ins, fields))

    def run() -> None:
        total = a + b
        part = total - a
        error = (a - (total - part)) + (b - part)
        negative = (total == 0) & (np.signbit(a) | np.signbit(b))
        np.copyto(
            d,
            np.where(error < 0, np.nextafter(total, np.float32(-np.inf)), np.where(negative, np.float32(-0.0), total)),
        )

    return run


@instruction("min max", r"(?P<ftz>\.ftz)?(?P<nan>\.NaN)?(?P<xor>\.xorsign\.abs)?\.(?P<type>f32|f64)", kind="fp32")
def extreme(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """Without `.NaN` a NaN operand loses to a number."""
    if fields["xor"]:
        raise unsupported(ins, ".xorsign.abs")
    a, b, d = operands(binder, ins, _type(ins, fields))
    return finish((KEEPING_NAN if fields["nan"] else LOSING_NAN)[fields["op"]], (a, b), d, fields)


def _type(ins: Instruction, fields: Fields) -> PtxType:
    if fields["type"] == "f64" and (fields.get("ftz") or fields.get("sat")):
        raise unsupported(ins, ".ftz and .sat are for f32")
    return parse_type(fields["type"])


@instruction("neg abs", r"(?P<ftz>\.ftz)?\.(?P<type>f32|f64)", kind="fp32")
def sign(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, d = operands(binder, ins, _type(ins, fields))
    return finish(np.negative if fields["op"] == "neg" else np.absolute, (a,), d, fields)


@instruction("copysign", r"\.(?P<type>f32|f64)", kind="fp32")
def copy_sign(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """The sign of the first operand on the magnitude of the second."""
    a, b, d = operands(binder, ins, parse_type(fields["type"]))
    return partial(np.copysign, b, a, d)


def fused_multiply_add(binder: Binder) -> Callable[[Lanes, Lanes, Lanes, Lanes], None]:
    """`(a, b, c, out)` for float32: the product is exact in float64 and the sum is rounded there, then to float32.

    The two roundings differ from one only where the float64 sum falls exactly between two float32, at most 2^-29 of the
    cases. An assignment takes less than `np.copyto`, and half of some checks is these lines."""
    x, y = binder.scratch(np.float64, 0), binder.scratch(np.float64, 1)

    def run(a: Lanes, b: Lanes, c: Lanes, out: Lanes) -> None:
        x[:] = a
        y[:] = b
        np.multiply(x, y, x)
        y[:] = c
        np.add(x, y, x)
        out[:] = x

    return run


@instruction("fma", r"\.rn(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.(?P<type>f32)", kind="fp32")
@instruction("mad", r"(?:\.rn)?(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.(?P<type>f32)", kind="fp32")
def multiply_add(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    *sources, d = operands(binder, ins, parse_type("f32"))
    return finish(fused_multiply_add(binder), tuple(sources), d, fields)


@instruction("fma", r"\.rn\.(?P<type>f64)", kind="fp32")
def multiply_add_double(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, c, d = operands(binder, ins, parse_type("f64"))
    if np.longdouble(0).itemsize <= 8:
        raise unsupported(ins, "this machine has no wider float to round once from")
    return lambda: np.copyto(d, a.astype(np.longdouble) * b + c, casting="same_kind")


@instruction("div", r"(?:\.approx|\.full|\.rn)(?P<ftz>\.ftz)?\.(?P<type>f32)", kind="sfu")
@instruction("div", r"\.rn\.(?P<type>f64)", kind="sfu")
def divide(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, d = operands(binder, ins, parse_type(fields["type"]))
    return finish(np.divide, (a, b), d, fields)


def _reciprocal(a: Lanes, out: Lanes) -> None:
    np.divide(a.dtype.type(1), a, out)


def _reciprocal_root(a: Lanes, out: Lanes) -> None:
    np.divide(1.0, np.sqrt(a, dtype=np.float64), out, casting="same_kind")


def _coarse_tanh(a: Lanes, out: Lanes) -> None:
    """Rounded to 17 bits: an H100's is up to 2^-16.8 off (96 numbers of the golden file), the PTX ISA allows 2^-11."""
    exact = np.atleast_1d(np.tanh(a))
    rounded = (exact.view(np.uint32) + np.uint32(0x40)) & np.uint32(0xFFFFFF80)
    np.copyto(out, np.where(np.isnan(exact), exact, rounded.view(np.float32)))


_FUNCTIONS: dict[str, Callable[..., object]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": _coarse_tanh,
    "rcp": _reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": _reciprocal_root,
}


@instruction("ex2 lg2 sin cos rsqrt", r"\.approx(?P<ftz>\.ftz)?\.(?P<type>f32)", kind="sfu")
@instruction("rcp sqrt", r"(?:\.approx|\.rn)(?P<ftz>\.ftz)?\.(?P<type>f32)", kind="sfu")
@instruction("rcp sqrt", r"\.rn\.(?P<type>f64)", kind="sfu")
@instruction("tanh", r"\.approx\.(?P<type>f32)", kind="sfu")
def function(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """Approximations but `tanh` are computed to full accuracy: they differ from hardware by the few ulp that the ISA
    allows it."""
    a, d = operands(binder, ins, parse_type(fields["type"]))
    return finish(_FUNCTIONS[fields["op"]], (a,), d, fields)


@instruction("testp", r"\.(?P<test>finite|infinite|number|notanumber)\.(?P<type>f32|f64)", kind="fp32")
def classify(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a = binder.source(ins.operands[1], parse_type(fields["type"]))
    d = binder.destination(ins.operands[0], parse_type("pred"))
    tests: dict[str, Callable[..., object]] = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "notanumber": np.isnan,
        "number": lambda x, out: np.invert(np.isnan(x), out),
    }
    return partial(tests[fields["test"]], a, d)
