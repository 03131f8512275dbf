"""PTX text → `Program`. Reads syntax only: nothing is refused here but text that it cannot read."""

import math
import re
from functools import lru_cache

from evoattn.ptx.errors import UnsupportedInstruction
from evoattn.ptx.program.kernel import Instruction, Kernel, Parameter, Program, align, parse_type, split_operands

# One statement, label or brace. A `{` at the start of a statement opens a scope; inside one it encloses a vector
# operand.
_STATEMENT = re.compile(
    r"\s*(?:(?P<label>[\w$]+)\s*:(?!:)|(?P<open>\{)|(?P<close>\})|(?P<text>[^;{}\s][^;{}]*(?:\{[^{}]*\}[^;{}]*)*);)"
)
_BOUNDS = re.compile(r"\.(?:maxntid|reqntid)\s+([\d,\s]+)")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{;]*)\{", re.S)
_VARIABLE = re.compile(r"\.(shared|local|global|const)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)\s*(?:\[(\d*)\])?")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[\w. ]*?\s)?([\w$]+)\s*(?:\[(\d+)\])?$")
_INSTRUCTION = re.compile(r"(?:@(!?)(\S+)\s+)?(\S+)\s*(.*)", re.S)
_REGISTER = re.compile(r"%?[A-Za-z_$][\w$]*(?:\.[xyzw])?")


@lru_cache(maxsize=16)
def parse_program(text: str) -> Program:
    """Parse a PTX module. Raises `UnsupportedInstruction` on text that this parser does not know."""
    text = re.sub(r"//[^\n]*|^\s*\.(?:loc|file)\b[^\n]*", "", text, flags=re.M)
    kernels = {}
    shared_by_module = [m for m in _VARIABLE.finditer(text) if m.group(1) == "shared"]
    for entry in _ENTRY.finditer(text):
        kernel = Kernel(entry.group(1))
        if bounds := _BOUNDS.search(entry.group(3)):
            kernel.max_threads = math.prod(int(extent) for extent in bounds[1].split(","))
        _read_parameters(kernel, entry.group(2))
        end = _read_body(kernel, text, entry.end())
        body = text[entry.end() : end]
        for variable in shared_by_module:
            # Module-level variables belong to the kernels that name them; those inside a body are read with it.
            outside = not _inside_any_body(text, variable.start())
            if outside and re.search(r"(?<![\w$])" + re.escape(variable.group(4)) + r"(?![\w$])", body):
                _declare_variable(kernel, variable)
        kernels[kernel.name] = kernel
    return Program(kernels)


def _inside_any_body(text: str, position: int) -> bool:
    return text.count("{", 0, position) > text.count("}", 0, position)


def _read_parameters(kernel: Kernel, text: str) -> None:
    for declaration in split_operands(" ".join(text.split())):
        match = _PARAMETER.match(declaration)
        if not match:
            raise UnsupportedInstruction(f'The parameter "{declaration}" of {kernel.name} is not understood.')
        alignment, kind, name, count = match.groups()
        width = parse_type(kind).bits // 8
        size = width * int(count or 1)
        offset = align(kernel.parameter_bytes, int(alignment or width))
        kernel.parameters.append(Parameter(name, offset, size))
        kernel.parameter_bytes = offset + size


def _declare_variable(kernel: Kernel, match: re.Match[str]) -> None:
    space, alignment, kind, name, count = match.groups()
    width = parse_type(kind).bits // 8
    alignment = int(alignment or width)
    if space == "shared" and count == "":
        kernel.dynamic_symbols[name] = alignment
    elif space == "shared":
        offset = kernel.shared[name] = align(kernel.static_smem_bytes, alignment)
        kernel.static_smem_bytes = offset + width * int(count or 1)
    elif space == "local":
        offset = kernel.local[name] = align(kernel.local_bytes, max(alignment, 16))
        kernel.local_bytes = offset + width * int(count or 1)
    else:
        raise UnsupportedInstruction(
            f'The variable "{name}" in {space} memory is outside the interpreter\'s whitelist.'
        )


def _declare_registers(kernel: Kernel, text: str, scope: dict[str, str] | None, number: int) -> None:
    _, kind, names = text.replace(".reg.", ".reg .", 1).split(None, 2)
    declared = parse_type(kind[1:])
    for name in names.split(","):
        name = name.strip()
        if name.endswith(">"):
            prefix, count = name[:-1].split("<")
            for i in range(int(count)):
                kernel.registers[f"{prefix}{i}"] = declared
        elif scope is None:
            kernel.registers[name] = declared
        else:  # a name inside an inline `{ … }` hides one outside
            scope[name] = f"{name}@{number}"
            kernel.registers[scope[name]] = declared


def _read_body(kernel: Kernel, text: str, position: int) -> int:
    """Read statements up to the brace that ends the body; returns its position."""
    scopes: list[dict[str, str]] = []
    opened = 0
    line, counted_to = text.count("\n", 0, position) + 1, position
    while True:
        match = _STATEMENT.match(text, position)
        if match is None:
            raise UnsupportedInstruction(f"The PTX of {kernel.name} is broken near line {line}.")
        position = match.end()
        if match.group("text"):
            start = match.start("text")
            line += text.count("\n", counted_to, start)
            counted_to = start
            _read_statement(kernel, " ".join(match.group("text").split()), scopes, opened, line)
        elif match.group("label"):
            kernel.labels[match.group("label")] = len(kernel.instructions)
        elif match.group("open"):
            scopes.append({})
            opened += 1
        elif scopes:
            scopes.pop()
        else:
            return position


def _read_statement(kernel: Kernel, text: str, scopes: list[dict[str, str]], opened: int, line: int) -> None:
    if text[0] == ".":
        if text.startswith(".reg"):
            _declare_registers(kernel, text, scopes[-1] if scopes else None, opened)
        elif variable := _VARIABLE.match(text):
            _declare_variable(kernel, variable)
        elif not text.startswith(".pragma"):
            raise UnsupportedInstruction(
                f'The directive "{text}" (PTX line {line}) is outside the interpreter\'s whitelist.'
            )
        return
    match = _INSTRUCTION.match(text)
    if match is None:
        raise UnsupportedInstruction(f'The statement "{text}" (PTX line {line}) is not understood.')
    negated, predicate, opcode, rest = match.groups()
    if any(scopes):
        names = {name: full for scope in scopes for name, full in scope.items()}
        rest = _REGISTER.sub(lambda m: names.get(m.group(), m.group()), rest)
        predicate = names.get(predicate, predicate)
    kernel.instructions.append(
        Instruction(
            len(kernel.instructions),
            opcode,
            split_operands(rest),
            (predicate, bool(negated)) if predicate else None,
            text,
            line,
        )
    )
