"""What a plain statement of an instruction is made of: a row of the table, whole numbers without a width, and reals
rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from tests.ptx.golden.operands import result_type

WHOLE = ("u16", "s16", "u32", "s32", "u64", "s64")
FORMATS = {"f16": (11, -14), "bf16": (8, -126), "f32": (24, -126), "f64": (53, -1022)}
"""Binary digits and the smallest normal exponent, of which the largest is 1 minus that."""


@dataclass(frozen=True)
class Statement:
    """`expect(*operands)` says what an instruction makes of operands of PTX types `kinds`, which the test draws with
    the keywords `how`.

    Operands come as `result_type` holds them, where `reals` is set decoded to float64, pairs as `[count, 2]`; a result
    of that kind is expected so. `after` follows the operands; `program` stands for the instruction alone where that
    does not write %d from %x0, …. An approximation may be off by `relative` of the result plus `absolute`; all else by
    nothing.
    """

    kinds: tuple[str, ...]
    result: str
    expect: Callable[..., np.ndarray]
    reals: bool = False
    after: str = ""
    program: str = ""
    how: dict = field(default_factory=dict)
    relative: float = 0.0
    absolute: float = 0.0

    def text(self, opcode: str) -> str:
        names = ", ".join(["%d", *(f"%x{i}" for i in range(len(self.kinds)))])
        return self.program or f"{opcode} {names}{self.after};"


Table = dict[str, Statement]


def wide(values: np.ndarray) -> np.ndarray:
    """As whole numbers without a width."""
    return values.astype(object)


def low_bits(value: int, kind: str) -> int:
    """What a type's register holds of a whole number."""
    value &= (1 << int(kind[1:])) - 1
    return value - (1 << int(kind[1:])) if kind[0] == "s" and value >> int(kind[1:]) - 1 else value


def whole(values: list[int], kind: str) -> np.ndarray:
    """Whole numbers modulo the width of a PTX type; 8 bits in a register of 32."""
    register = kind if kind[1:] != "8" else f"{kind[0]}32"
    return np.array([low_bits(low_bits(int(v), kind), register) for v in values], result_type(register))


def each(formula: Callable, kind: str) -> Callable[..., np.ndarray]:
    """Thread by thread on Python's whole numbers."""
    return lambda *operands: whole([formula(*v) for v in zip(*(o.tolist() for o in operands))], kind)


def bits_of(kind: str) -> str:
    """The type of one of a pair, or the type itself."""
    return kind.removesuffix("x2")


def decode(values: np.ndarray, kind: str) -> np.ndarray:
    """Bits or floats of a real PTX type → float64."""
    if kind.endswith("x2"):
        values = values.view(np.uint16).reshape(-1, 2)
    if kind.startswith("bf16"):
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return (values.view(np.float16) if kind.startswith("f16") else values).astype(np.float64)


def nearest(value: Fraction, kind: str, truncate: bool = False) -> float:
    """The number of a format nearest to `value`, even on a tie; or the next towards zero. Too large is infinite, or the
    largest.
    """
    digits, lowest = FORMATS[kind]
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, lowest) - digits + 1)
    rounded = (int(size / step) if truncate else round(size / step)) * step
    if rounded >= Fraction(2) ** (2 - lowest):
        rounded = (2 - Fraction(2) ** (1 - digits)) * Fraction(2) ** (1 - lowest) if truncate else math.inf
    return math.copysign(float(rounded), value)


def once(formula: Callable, kind: str, truncate: bool = False) -> Callable[..., np.ndarray]:
    """`formula` of exact fractions, rounded once to a format; of infinities and NaN, and for the sign of a zero,
    Python's floats.
    """

    def of_numbers(*values: float) -> float:
        if all(map(math.isfinite, values)) and (exact := formula(*map(Fraction, values))):
            return nearest(exact, bits_of(kind), truncate)
        return formula(*values)

    return lambda *operands: np.vectorize(of_numbers, otypes=[np.float64])(*operands)


def flushed(values: np.ndarray, kind: str) -> np.ndarray:
    """Subnormal numbers of a format as zeros of their sign."""
    return np.where(np.abs(values) < 2.0 ** FORMATS[bits_of(kind)][1], np.copysign(0.0, values), values)


def dressed(formula: Callable, kind: str, words: str) -> Callable[..., np.ndarray]:
    """`formula` on float64 arrays with what `.ftz`, `.sat` (NaN to 0) and `.relu` among the words of an opcode ask for
    around it.
    """

    def run(*operands: np.ndarray) -> np.ndarray:
        ftz = (lambda v: flushed(v, kind)) if ".ftz" in words else (lambda v: v)
        result = ftz(formula(*map(ftz, operands)))
        if ".sat" in words:
            return np.where(result > 0, np.minimum(result, 1), 0.0)
        return np.where(result <= 0, 0.0, result) if ".relu" in words else result

    return run
