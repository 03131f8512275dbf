"""What a PTX module says: kernels, their registers, symbols and instructions."""

from dataclasses import dataclass, field

from evoattn.ptx.program.dtypes import PtxType


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
