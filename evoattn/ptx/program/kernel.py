"""What a PTX module says: kernels, their registers, symbols, instructions and operands; PTX types as NumPy has them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True)
class Instruction:
    """One instruction. `predicate` is (register, negated) or None; `index` is its pc; `line` its line in the PTX
    text."""

    index: int
    opcode: str
    operands: tuple[str, ...]
    predicate: tuple[str, bool] | None
    text: str
    line: int

    def __str__(self) -> str:
        return f'"{self.text}" (PTX line {self.line})'


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: where it lies in the parameter space, in bytes."""

    name: str
    offset: int
    size: int


@dataclass(eq=False)
class Kernel:
    """One `.entry`: registers by name, labels as pcs, symbol offsets in bytes."""

    name: str
    parameters: list[Parameter] = field(default_factory=list)
    parameter_bytes: int = 0
    registers: dict[str, PtxType] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    shared: dict[str, int] = field(default_factory=dict)
    static_smem_bytes: int = 0
    dynamic_symbols: dict[str, int] = field(default_factory=dict)
    """`extern __shared__` arrays: name → alignment; all of them start where static shared memory ends."""
    local: dict[str, int] = field(default_factory=dict)
    local_bytes: int = 0
    max_threads: int | None = None
    """Of a block, as `__launch_bounds__` promised the compiler; None where nothing was."""

    @property
    def dynamic_offset(self) -> int:
        """Byte at which dynamic shared memory starts."""
        return align(self.static_smem_bytes, max(self.dynamic_symbols.values(), default=1))


@dataclass(frozen=True)
class Program:
    """A parsed PTX module."""

    kernels: dict[str, Kernel]


def align(offset: int, alignment: int) -> int:
    return (offset + alignment - 1) // alignment * alignment


_ADDRESS = re.compile(r"\[\s*(.+?)\s*(?:\+\s*(-?(?:0[xX])?[0-9a-fA-F]+))?\s*\]$")


def split_operands(text: str) -> tuple[str, ...]:
    """Split at commas outside brackets."""
    if "{" not in text and "[" not in text and "(" not in text:
        return tuple([part.strip() for part in text.split(",")]) if text else ()
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        if char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return (*parts, text[start:].strip())


@cache
def vector_parts(operand: str) -> tuple[str, ...]:
    """`{a, b}` → (a, b); a plain operand → itself."""
    return split_operands(operand[1:-1]) if operand.startswith("{") else (operand,)


@cache
def split_address(operand: str) -> tuple[str, int]:
    match = _ADDRESS.match(operand)
    if match is None:
        raise UnsupportedInstruction(f'The address "{operand}" is not understood.')
    return match.group(1), int(match.group(2) or "0", 0)


def operand_registers(operand: str, kernel: Kernel) -> list[str]:
    """Names of the registers that occur in an operand."""
    if operand in kernel.registers:
        return [operand]
    return [name for name in re.findall(r"[%\w$@]+", operand) if name in kernel.registers]


def group_count(operand: str) -> int:
    """Groups that may be pending after a wait: a constant. Raises `UnsupportedInstruction` on another operand."""
    if not operand.isdecimal():
        raise UnsupportedInstruction(f'"{operand}" is no count of groups.')
    return int(operand)


Lanes = NDArray[Any]
"""One element per thread, of a register's type; 0-d for a constant that all threads share."""
Mask = NDArray[np.bool_]
"""One bool per thread: who executes, waits or is alive."""
Numbers = NDArray[np.integer[Any]]
"""Integers that count or point: indices of threads or bytes, times, counts."""
Octets = NDArray[np.uint8]
"""Bytes of a memory."""
