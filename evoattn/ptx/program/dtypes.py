"""PTX types and the NumPy types that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from evoattn.ptx.errors import UnsupportedInstruction

UNSIGNED: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.bool_),
    8: np.dtype(np.uint8),
    16: np.dtype(np.uint16),
    32: np.dtype(np.uint32),
    64: np.dtype(np.uint64),
}
SIGNED: dict[int, np.dtype[Any]] = {
    8: np.dtype(np.int8),
    16: np.dtype(np.int16),
    32: np.dtype(np.int32),
    64: np.dtype(np.int64),
}
FLOAT: dict[int, np.dtype[Any]] = {32: np.dtype(np.float32), 64: np.dtype(np.float64)}


@dataclass(frozen=True, eq=False)
class PtxType:
    """One of the types of `parse_type`, and never another, so that identity is equality.

    `kind` is `pred`, `b`, `u`, `s`, `f` or `bf`; `bits` the width of the whole; `packed` tells two 16-bit numbers in 32
    bits."""

    kind: str
    bits: int
    packed: bool = False

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """NumPy type of a register of this type. 16-bit floats are kept as their bits."""
        if self.kind == "s":
            return SIGNED[self.bits]
        if self.kind == "f" and self.bits >= 32 and not self.packed:
            return FLOAT[self.bits]
        return UNSIGNED[self.bits]

    @property
    def is_half(self) -> bool:
        """A 16-bit float or a pair of them."""
        return self.kind in ("f", "bf") and (self.packed or self.bits == 16)

    @property
    def is_float(self) -> bool:
        return self.kind in ("f", "bf")

    def of_width(self, bits: int) -> PtxType:
        """The same kind of another width."""
        return parse_type(f"{self.kind}{bits}")


_TYPES = {
    "pred": PtxType("pred", 1),
    "f16x2": PtxType("f", 32, True),
    "bf16x2": PtxType("bf", 32, True),
    "bf16": PtxType("bf", 16),
}
_TYPES |= {f"{kind}{bits}": PtxType(kind, bits) for kind in "bus" for bits in (8, 16, 32, 64)}
_TYPES |= {f"f{bits}": PtxType("f", bits) for bits in (16, 32, 64)}


@cache
def parse_type(name: str) -> PtxType:
    """The type called `name`, without its dot. Raises `UnsupportedInstruction` on one outside the whitelist."""
    try:
        return _TYPES[name]
    except KeyError:
        raise UnsupportedInstruction(f"The type .{name} is outside the interpreter's whitelist.") from None
