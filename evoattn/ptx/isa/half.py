"""fp16 and bf16 as arrays of bits: to float32 and back; arithmetic on single ones or pairs, rounded once."""

from collections.abc import Callable

import numpy as np

from evoattn.ptx.errors import unsupported
from evoattn.ptx.isa.dispatch import Fields, Operation, instruction
from evoattn.ptx.isa.floating import KEEPING_NAN, LOSING_NAN
from evoattn.ptx.program.kernel import Instruction, Lanes, PtxType, parse_type
from evoattn.ptx.state.registers import Binder

# NumPy converts fp16 in software, 16 ns a number; a look-up takes 1 ns.
FP16_VALUES = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)


def to_float32(bits: Lanes, kind: str) -> Lanes:
    """uint16 bits of fp16 (`kind` "f") or bf16 ("bf") → float32, exactly, same shape."""
    if kind == "f":
        return FP16_VALUES.take(bits)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float(values: Lanes, kind: str) -> Lanes:
    """float32 or float64 → uint16 bits, rounded once to nearest even; NaN becomes 0x7FFF (PTX ISA, cvt)."""
    if kind == "f":
        narrow = np.ascontiguousarray(values.astype(np.float16)).view(np.uint16)
    else:
        bits = np.ascontiguousarray(_to_odd_float32(values) if values.dtype == np.float64 else values).view(np.uint32)
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        rounded >>= np.uint32(16)
        narrow = rounded.astype(np.uint16)
    no_numbers = np.isnan(values)
    if no_numbers.any():
        narrow[no_numbers] = 0x7FFF
    return narrow


def from_float_truncated(values: Lanes, kind: str) -> Lanes:
    """float32 → uint16 bits, rounded towards zero."""
    if kind == "bf":
        bits = np.ascontiguousarray(values).view(np.uint32) >> np.uint32(16)
        return np.where(np.isnan(values), np.uint32(0x7FFF), bits).astype(np.uint16)
    nearest = values.astype(np.float16)
    beyond = np.abs(nearest.astype(np.float32)) > np.abs(values)
    bits = np.ascontiguousarray(nearest).view(np.uint16)
    return bits - beyond.astype(np.uint16)  # one step towards zero, in sign-magnitude


def _to_odd_float32(values: Lanes) -> Lanes:
    """float64 → float32 rounded to odd, so that a second rounding to fewer bits is as one (Boldo and Melquiond,
    2008)."""
    nearest = values.astype(np.float32)
    bits = nearest.view(np.uint32).copy()
    back = nearest.astype(np.float64)
    inexact = (back != values) & np.isfinite(back) & np.isfinite(values)
    even = (bits & 1) == 0
    up = np.abs(back) < np.abs(values)  # the odd neighbour lies on the side of the exact value
    bits = np.where(inexact & even, np.where(up, bits + 1, bits - 1), bits).astype(np.uint32)
    return bits.view(np.float32)


_FP16 = r"\.(?P<type>f16x2|f16)"
_ANY = r"\.(?P<type>f16x2|bf16x2|f16|bf16)"
_FP16_SMALLEST_NORMAL = np.float32(2.0**-14)


def _product_sum(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """a·b + c in float64: exact for fp16, and for bf16 but for sums that span more than 53 bits."""
    total: Lanes = a.astype(np.float64) * b + c
    return total


_COMPUTE: dict[str, Callable[..., Lanes]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": _product_sum,
    **LOSING_NAN,
    "ex2": np.exp2,
    "tanh": np.tanh,
    "neg": np.negative,
    "abs": np.abs,
}


def _unpacked(binder: Binder, operand: str, kind: PtxType) -> Lanes:
    """uint16 view of an operand: `[threads]`, or `[threads, 2]` for a pair (0-d or `[2]` for a constant)."""
    array = binder.source(operand, kind)
    if not kind.packed:
        return array
    return array.view(np.uint16).reshape(-1, 2) if array.ndim else np.frombuffer(array.tobytes(), np.uint16)


@instruction("add sub mul", r"(?P<rn>\.rn)?(?P<ftz>\.ftz)?(?P<sat>\.sat)?" + _FP16, kind="fp32")
@instruction("add sub mul", r"(?P<rn>\.rn)?\.(?P<type>bf16x2|bf16)", kind="fp32")
@instruction("fma", r"\.rn(?P<ftz>\.ftz)?(?P<sat>\.sat|\.relu)?" + _FP16, kind="fp32")
@instruction("fma", r"\.rn(?P<sat>\.relu)?\.(?P<type>bf16x2|bf16)", kind="fp32")
@instruction("min max", r"(?P<ftz>\.ftz)?(?P<nan>\.NaN)?" + _ANY, kind="fp32")
@instruction("neg abs", r"(?P<ftz>\.ftz)?" + _ANY, kind="fp32")
@instruction("ex2 tanh", r"\.approx" + _FP16, kind="sfu")
@instruction("ex2", r"\.approx\.ftz\.(?P<type>bf16x2|bf16)", kind="sfu")
@instruction("tanh", r"\.approx\.(?P<type>bf16x2|bf16)", kind="sfu")
def arithmetic(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    kind = parse_type(fields["type"])
    if fields.get("ftz") and kind.kind == "bf":
        raise unsupported(ins, ".ftz is for fp16")
    sources = [_unpacked(binder, o, kind) for o in ins.operands[1:]]
    d = binder.destination(ins.operands[0], kind)
    d = d.view(np.uint16).reshape(-1, 2) if kind.packed else d
    compute = (KEEPING_NAN if fields.get("nan") else _COMPUTE)[fields["op"]]
    ftz, sat = fields.get("ftz"), fields.get("sat")

    def run() -> None:
        values = [to_float32(s, kind.kind) for s in sources]
        if ftz:
            values = [_flush(v) for v in values]
        result = compute(*values)
        if ftz:
            result = _flush(result)
        if sat == ".sat":
            result = np.fmin(np.fmax(result, 0), 1)
        elif sat == ".relu":
            result = np.maximum(result, 0)
        np.copyto(d, from_float(np.asarray(result), kind.kind))

    return run


def _flush(values: Lanes) -> Lanes:
    return np.where(np.abs(values) < _FP16_SMALLEST_NORMAL, np.copysign(0, values), values).astype(values.dtype)
