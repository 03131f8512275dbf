"""fp16 and bf16 as arrays of bits: to float32 and back."""

import numpy as np

from evoattn.ptx.program.arrays import Lanes

# NumPy converts fp16 in software, 16 ns a number; a look-up takes 1 ns.
FP16_VALUES = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)


def to_float32(bits: Lanes, kind: str) -> Lanes:
    """uint16 bits of fp16 (`kind` "f") or bf16 ("bf") → float32, exactly, same shape."""
    if kind == "f":
        return FP16_VALUES.take(bits)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float(values: Lanes, kind: str) -> Lanes:
    """float32 or float64 → uint16 bits, rounded once to nearest even."""
    if kind == "f":
        return np.ascontiguousarray(values.astype(np.float16)).view(np.uint16)
    if values.dtype == np.float64:
        values = _to_odd_float32(values)
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


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
