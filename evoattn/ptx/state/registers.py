"""Registers as arrays with an element for each thread, and operands as views of them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from evoattn.ptx.errors import UnsupportedInstruction
from evoattn.ptx.program.kernel import UNSIGNED, Kernel, Lanes, PtxType, parse_type, split_address
from evoattn.ptx.program.threads import Threads

_UNWRITTEN = {1: False, 8: 0x7E, 16: 0x7FFE, 32: 0x7FFE7FFE, 64: 0x7FFE7FFE7FFE7FFE}
"""What registers hold before they are written: a NaN in every float type, and no small number. On a GPU it is whatever
was there before."""
_BANK_BYTES = 1 << 16
"""Of registers that are made together: to make one takes longer than to fill it."""
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|[0-9]+)U?$")
_FLOAT = re.compile(r"0([fF])([0-9A-Fa-f]{8})$|0([dD])([0-9A-Fa-f]{16})$")


@dataclass(frozen=True)
class Address:
    """`[base + offset]`: `base` is an array over threads (uint32 or uint64) or a 0-d array."""

    base: Lanes
    offset: int


class Binder:
    """Turns operand text into arrays for one machine. `prepare` functions of the instruction table work with it."""

    def __init__(self, kernel: Kernel, threads: Threads, shared_symbols: dict[str, int], parameters: Lanes) -> None:
        self.kernel, self.threads = kernel, threads
        self.shared_symbols = shared_symbols
        self.parameters = parameters
        self._registers: dict[str, Lanes] = {}
        self._unused = {bits: _rows(threads.count, bits) for bits in _UNWRITTEN}
        self._sources: dict[tuple[str, PtxType], Lanes] = {}
        self._scratch: dict[tuple[np.dtype, int], Lanes] = {}

    @property
    def count(self) -> int:
        return self.threads.count

    def register(self, name: str) -> Lanes:
        """The register's bits, unsigned (bool for a predicate). Raises `UnsupportedInstruction` on an undeclared
        name."""
        array = self._registers.get(name)
        if array is None:
            declared = self.kernel.registers.get(name)
            if declared is None:
                raise UnsupportedInstruction(f'The operand "{name}" of {self.kernel.name} is not understood.')
            array = self._registers[name] = next(self._unused[declared.bits])
        return array

    def scratch(self, dtype: type | np.dtype, number: int = 0) -> Lanes:
        """An array over threads, shared by all instructions, whose content lasts only for one instruction."""
        key = (np.dtype(dtype), number)
        if key not in self._scratch:
            self._scratch[key] = np.zeros(self.count, dtype)
        return self._scratch[key]

    def source(self, operand: str, kind: PtxType) -> Lanes:
        """An operand to read: a view over threads, or a 0-d array for a constant. A wider register gives its low
        part."""
        key = (operand, kind)
        found = self._sources.get(key)
        if found is None:
            found = self._sources[key] = self._find_source(operand, kind)
        return found

    def _find_source(self, operand: str, kind: PtxType) -> Lanes:
        if operand in self.kernel.registers:
            return self._as(self.register(operand), kind, operand)
        special = self.threads.special_register(operand) if operand[0] in "%W" else None
        if special is None:
            return self._constant(operand, kind)
        return special.astype(kind.dtype) if kind.bits == 64 else self._as(special, kind, operand)

    def destination(self, operand: str, kind: PtxType) -> Lanes:
        """An operand to write: a view over threads, as wide as its register (so that a narrow value is extended on
        assignment)."""
        if operand == "_":
            return self.scratch(kind.dtype, -1)
        array = self.register(operand)
        width = self.kernel.registers[operand].bits
        if width == kind.bits:
            return array if array.dtype is kind.dtype else array.view(kind.dtype)
        if width < kind.bits or kind.bits == 1 or width == 1:
            raise UnsupportedInstruction(f'The register "{operand}" cannot hold a .{kind.kind}{kind.bits}.')
        if kind.is_float:
            raise UnsupportedInstruction(
                f'The register "{operand}" is wider than the .{kind.kind}{kind.bits} put into it.'
            )
        return array.view(kind.of_width(width).dtype)

    def address(self, operand: str) -> Address:
        """`[register + offset]` or `[symbol + offset]`."""
        name, offset = split_address(operand)
        if name in self.kernel.registers:
            return Address(self.register(name), offset)
        return Address(self._constant(name, parse_type("u64")), offset)

    def _as(self, array: Lanes, kind: PtxType, operand: str) -> Lanes:
        if array.dtype is kind.dtype:
            return array
        if (array.dtype == np.bool_) != (kind.kind == "pred"):
            raise UnsupportedInstruction(f'The operand "{operand}" is not a .{kind.kind}{kind.bits}.')
        if array.dtype.itemsize == kind.dtype.itemsize:
            return array.view(kind.dtype)
        if array.dtype.itemsize < kind.dtype.itemsize:
            raise UnsupportedInstruction(f'The register "{operand}" is narrower than .{kind.kind}{kind.bits}.')
        return array.view(kind.dtype)[:: array.dtype.itemsize // kind.dtype.itemsize]  # little endian: the low part

    def _constant(self, operand: str, kind: PtxType) -> Lanes:
        if (number := _number(operand, kind)) is not None:
            return number
        base, _, offset = operand.partition("+")
        base = base.strip()
        if base in self.shared_symbols or base in self.kernel.local:
            start = self.shared_symbols.get(base, self.kernel.local.get(base, 0))
            return np.asarray(start + int(offset or "0", 0), UNSIGNED[kind.bits])
        for parameter in self.kernel.parameters:
            if parameter.name == base:
                return np.asarray(parameter.offset + int(offset or "0", 0), UNSIGNED[kind.bits])
        raise UnsupportedInstruction(
            f'The operand "{operand}" of {self.kernel.name} is outside the interpreter\'s whitelist.'
        )


def _rows(threads: int, bits: int) -> Iterator[Lanes]:
    """Registers without end: one after another out of arrays of several."""
    several = max(1, _BANK_BYTES * 8 // max(bits, 8) // threads)
    while True:
        yield from np.full((several, threads), _UNWRITTEN[bits], UNSIGNED[bits])


@lru_cache(maxsize=1 << 14)
def _number(operand: str, kind: PtxType) -> Lanes | None:
    """A literal as a 0-d array that nobody writes; None if it is none."""
    if match := _FLOAT.match(operand):
        single, double = match.group(2), match.group(4)
        number: np.floating[Any] = np.uint64(int(double or "0", 16)).view(np.float64)
        if single:
            number = np.uint32(int(single, 16)).view(np.float32)
        bits = number.astype(kind.dtype) if kind.kind == "f" else number.view(UNSIGNED[kind.bits])
        return np.asarray(bits, kind.dtype)
    if _INTEGER.match(operand):
        value = int(operand.rstrip("U"), 0) & ((1 << max(kind.bits, 8)) - 1)
        if kind.kind == "pred":
            return np.asarray(value != 0)
        return np.asarray(value, UNSIGNED[kind.bits]).view(kind.dtype)
    return None
