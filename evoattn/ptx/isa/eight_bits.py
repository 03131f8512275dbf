"""Conversions between pairs of 8-bit floats, e4m3 and e5m2, and pairs of fp16 or two fp32 (sm_89).

The formats: Micikevicius et al., "FP8 formats for deep learning", 2022; rounding and NaN: PTX ISA, cvt."""

import numpy as np

from evoattn.ptx.isa.dispatch import Fields, Operation, instruction
from evoattn.ptx.isa.half import FP16_VALUES
from evoattn.ptx.program.kernel import Instruction, Lanes, parse_type
from evoattn.ptx.state.registers import Binder

NOT_A_NUMBER = 0x7F
"""In both formats."""


def _e4m3_values() -> Lanes:
    """Of the 256 codes, float32: 4 bits of exponent of bias 7, no infinity, and NaN with all bits but the sign."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent > 0, np.exp2(exponent - 7.0) * (1 + mantissa / 8), np.exp2(-6.0) * mantissa / 8)
    values[NOT_A_NUMBER] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


VALUES: dict[str, Lanes] = {"e4m3": _e4m3_values(), "e5m2": FP16_VALUES[np.arange(256) << 8]}
"""float32 of each code; e5m2 is the upper half of an fp16."""
_FORMATS = {"e4m3": (3, 7, np.float32(448)), "e5m2": (2, 15, np.float32(57344))}
"""Bits of the mantissa, bias of the exponent, greatest number."""
_HALVES = {
    kind: np.where(np.isnan(values), np.uint16(0x7FFF), values.astype(np.float16).view(np.uint16))
    for kind, values in VALUES.items()
}


def to_code(values: Lanes, kind: str) -> Lanes:
    """float32 → uint8, rounded to the nearest, of two as near to the even code; what is past the largest finite number
    becomes it (`.satfinite`)."""
    mantissa, bias, greatest = _FORMATS[kind]
    sizes = np.minimum(np.abs(values), greatest)
    bits = sizes.view(np.uint32)
    dropped = np.uint32(23 - mantissa)
    codes = bits + (bits >> dropped & np.uint32(1)) + ((np.uint32(1) << dropped - np.uint32(1)) - np.uint32(1))
    codes >>= dropped
    codes -= np.uint32(127 - bias << mantissa)
    small = sizes < np.float32(2.0 ** (1 - bias))  # in steps of the smallest number
    np.copyto(codes, np.rint(sizes * np.float32(2.0 ** (mantissa + bias - 1))), "unsafe", small)
    codes |= np.signbit(values) * np.uint32(0x80)
    codes[np.isnan(values)] = NOT_A_NUMBER
    return codes.astype(np.uint8)


@instruction("cvt", r"\.rn\.f16x2\.(?P<type>e4m3|e5m2)x2", kind="cvt")
def pair_to_halves(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """Exact."""
    a = binder.source(ins.operands[1], parse_type("b16"))
    d = binder.destination(ins.operands[0], parse_type("f16x2")).view(np.uint16).reshape(-1, 2)
    halves = _HALVES[fields["type"]]

    def run() -> None:
        pairs = np.atleast_1d(a)
        np.copyto(d, np.stack([halves[pairs & 0xFF], halves[pairs >> 8]], 1))

    return run


@instruction("cvt", r"\.rn\.satfinite\.(?P<to>e4m3|e5m2)x2\.f32", kind="cvt")
def floats_to_pair(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """The first source becomes the upper byte."""
    high, low = (binder.source(o, parse_type("f32")) for o in ins.operands[1:3])
    d = binder.destination(ins.operands[0], parse_type("b16"))
    return lambda: _put_pair(d, high, low, fields["to"])


@instruction("cvt", r"\.rn\.satfinite\.(?P<to>e4m3|e5m2)x2\.f16x2", kind="cvt")
def halves_to_pair(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a = binder.source(ins.operands[1], parse_type("f16x2"))
    d = binder.destination(ins.operands[0], parse_type("b16"))

    def run() -> None:
        pairs = np.atleast_1d(a)
        _put_pair(
            d, FP16_VALUES.take(pairs >> np.uint32(16)), FP16_VALUES.take(pairs & np.uint32(0xFFFF)), fields["to"]
        )

    return run


def _put_pair(d: Lanes, high: Lanes, low: Lanes, kind: str) -> None:
    upper, lower = (to_code(np.atleast_1d(v), kind).astype(np.uint16) for v in (high, low))
    np.copyto(d, upper << np.uint16(8) | lower)
