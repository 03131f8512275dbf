"""Operands as they are written: lists, vectors, addresses, and the registers that occur in them."""

import re
from functools import cache

from evoattn.ptx.errors import UnsupportedInstruction
from evoattn.ptx.program.kernel import Kernel

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
