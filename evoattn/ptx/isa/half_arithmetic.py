"""Arithmetic on fp16 and bf16, single or packed in pairs: computed in float32 or wider and rounded once."""

from collections.abc import Callable

import numpy as np

from evoattn.ptx.errors import unsupported
from evoattn.ptx.isa.dispatch import Fields, Operation, instruction
from evoattn.ptx.isa.floating import KEEPING_NAN, LOSING_NAN
from evoattn.ptx.isa.half import from_float, to_float32
from evoattn.ptx.program.arrays import Lanes
from evoattn.ptx.program.dtypes import PtxType, parse_type
from evoattn.ptx.program.kernel import Instruction
from evoattn.ptx.state.registers import Binder

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
