"""Conversions of values and addresses: cvt and cvta."""

from functools import partial

import numpy as np

from evoattn.ptx.errors import unsupported
from evoattn.ptx.isa.dispatch import Fields, Operation, instruction
from evoattn.ptx.isa.floating import finish, flush
from evoattn.ptx.isa.half import from_float, from_float_truncated, to_float32
from evoattn.ptx.memory.address_space import LOCAL_WINDOW, PARAMETER_WINDOW, SHARED_WINDOW
from evoattn.ptx.program.kernel import Instruction, parse_type
from evoattn.ptx.state.registers import Binder

_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_INTEGER = r"[us](?:8|16|32|64)"
_FLOAT = r"f16|bf16|f32|f64"


@instruction("cvt", rf"(?P<sat>\.sat)?\.(?P<to>{_INTEGER})\.(?P<type>{_INTEGER})", kind="cvt")
def integer_to_integer(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """Cut or extended by the source's sign; clamped with `.sat`. A narrow result is extended into its wider
    register."""
    to, kind = parse_type(fields["to"]), parse_type(fields["type"])
    a, d = binder.source(ins.operands[1], kind), binder.destination(ins.operands[0], to)
    if fields["sat"]:
        if kind.bits == 64:
            raise unsupported(ins, "saturation from 64 bits")
        low, high = np.iinfo(to.dtype).min, np.iinfo(to.dtype).max
        return lambda: np.copyto(d, np.clip(a.astype(np.int64), max(low, -(2**62)), min(high, 2**62)), casting="unsafe")
    if d.dtype.itemsize == to.dtype.itemsize:
        return partial(np.copyto, d, a, "unsafe")
    return lambda: np.copyto(d, a.astype(to.dtype))


@instruction(
    "cvt", rf"\.(?P<round>rni|rzi|rmi|rpi)(?P<ftz>\.ftz)?(?:\.sat)?\.(?P<to>{_INTEGER})\.(?P<type>{_FLOAT})", kind="cvt"
)
def float_to_integer(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """Clamped to the range of the result; NaN gives 0 (for 64-bit results and f64 sources the top bit alone)."""
    to, kind = parse_type(fields["to"]), parse_type(fields["type"])
    a, d = binder.source(ins.operands[1], kind), binder.destination(ins.operands[0], to)
    limits, round_to = np.iinfo(to.dtype), _ROUND[fields["round"]]
    of_nan = to.dtype.type(0)
    if to.bits == 64 or kind.bits == 64:
        of_nan = np.array(1 << (to.bits - 1), f"u{to.bits // 8}").view(to.dtype)[()]

    def run() -> None:
        values = to_float32(a, kind.kind) if kind.is_half else a
        values = round_to((flush(values) if fields["ftz"] else values).astype(np.float64))
        result = values.astype(to.dtype)
        result = np.where(values >= float(limits.max) + (to.bits < 64), limits.max, result)
        result = np.where(values <= float(limits.min), limits.min, result)
        np.copyto(d, np.where(np.isnan(values), of_nan, result).astype(to.dtype))

    return run


@instruction("cvt", rf"\.rn\.(?P<to>{_FLOAT})\.(?P<type>{_INTEGER})", kind="cvt")
def integer_to_float(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    to, kind = parse_type(fields["to"]), parse_type(fields["type"])
    a, d = binder.source(ins.operands[1], kind), binder.destination(ins.operands[0], to)
    if to.is_half:
        if kind.bits == 64:
            raise unsupported(ins, "a 64-bit integer to a 16-bit float")
        return lambda: np.copyto(d, from_float(np.atleast_1d(a.astype(np.float64)), to.kind))
    return partial(np.copyto, d, a, "unsafe")


@instruction("cvt", rf"(?:\.rn)?(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.(?P<to>f32|f64)\.(?P<type>{_FLOAT})", kind="cvt")
def float_to_wide_float(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    to, kind = parse_type(fields["to"]), parse_type(fields["type"])
    a, d = binder.source(ins.operands[1], kind), binder.destination(ins.operands[0], to)
    plain = not fields["ftz"] and not fields["sat"]
    if plain and kind.is_half:
        return lambda: np.copyto(d, to_float32(a, kind.kind))
    if plain:
        return partial(np.copyto, d, a, "same_kind")

    def run() -> None:
        values = to_float32(a, kind.kind) if kind.is_half else a
        if fields["ftz"] and "f32" in (fields["to"], fields["type"]):
            values = flush(values.astype(np.float32)) if fields["to"] == "f32" or kind.bits == 32 else values
        if fields["sat"]:
            values = np.fmin(np.fmax(values, values.dtype.type(0)), values.dtype.type(1))
        np.copyto(d, values, "same_kind")

    return run


@instruction("cvt", r"\.(?P<round>rni|rzi|rmi|rpi)(?P<ftz>\.ftz)?(?P<sat>\.sat)?\.(?P<type>f32)\.f32", kind="cvt")
def round_to_whole(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, d = (binder.source(ins.operands[1], parse_type("f32")), binder.destination(ins.operands[0], parse_type("f32")))
    return finish(_ROUND[fields["round"]], (a,), d, fields)


@instruction("cvt", r"\.(?P<round>rn|rz)(?P<relu>\.relu)?\.(?P<to>f16|bf16)\.(?P<type>f32)", kind="cvt")
@instruction("cvt", r"\.(?P<round>rn)\.(?P<to>f16)\.(?P<type>f64)", kind="cvt")
def float_to_half(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    to, kind = parse_type(fields["to"]), parse_type(fields["type"])
    a, d = binder.source(ins.operands[1], kind), binder.destination(ins.operands[0], to)
    convert = from_float if fields["round"] == "rn" else from_float_truncated
    relu = bool(fields.get("relu"))
    return lambda: np.copyto(d, convert(np.atleast_1d(np.maximum(a, 0) if relu else a), to.kind))


@instruction("cvt", r"\.(?P<round>rn|rz)(?P<relu>\.relu)?\.(?P<to>f16x2|bf16x2)\.f32", kind="cvt")
def float_pair_to_halves(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """The first source becomes the upper half."""
    high, low = (binder.source(o, parse_type("f32")) for o in ins.operands[1:3])
    to = parse_type(fields["to"])
    d = binder.destination(ins.operands[0], to).view(np.uint16).reshape(-1, 2)
    convert = from_float if fields["round"] == "rn" else from_float_truncated
    pair = np.zeros((2, binder.count), np.float32)
    relu = bool(fields["relu"])

    def run() -> None:
        pair[0], pair[1] = low, high
        np.copyto(d, convert(np.maximum(pair, 0) if relu else pair, to.kind).T)

    return run


@instruction("cvt", r"\.rna\.tf32\.f32", kind="cvt")
def float_to_tf32(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """Rounded to 10 mantissa bits, ties away from zero."""
    a, d = binder.source(ins.operands[1], parse_type("b32")), binder.destination(ins.operands[0], parse_type("b32"))

    def run() -> None:
        rounded = (a + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
        np.copyto(d, np.where((a & np.uint32(0x7F800000)) == np.uint32(0x7F800000), a, rounded))

    return run


@instruction("cvta", r"(?P<to>\.to)?\.(?P<space>global|shared|local|param|const)\.u64", kind="move")
def convert_address(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """Between a space's own addresses and generic ones, which see shared, local and parameter memory through
    windows."""
    windows = {"global": 0, "shared": SHARED_WINDOW, "local": LOCAL_WINDOW, "param": PARAMETER_WINDOW}
    if fields["space"] not in windows:
        raise unsupported(ins, "constant memory")
    kind = parse_type("u64")
    a, d = binder.source(ins.operands[1], kind), binder.destination(ins.operands[0], kind)
    start = np.asarray(windows[fields["space"]], np.uint64)
    return partial(np.subtract if fields["to"] else np.add, a, start, d)
